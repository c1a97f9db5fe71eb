"""Rewards from functions of the user's, which run in processes of their own.

functions         starts the processes, asks them, and answers about files of images
function_process  the program of such a process; paths inside images

Other rooms import functions.
"""
