"""Tests of the whole program: real processes, endpoints on loopback, signals."""
