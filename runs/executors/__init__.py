"""Where workers run: processes of this machine, or Ray actors."""
