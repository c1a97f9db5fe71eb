"""Rewards from functions of the user's, which run in processes of their own.

functions         starts the processes and asks them
function_process  the program of such a process; paths inside images
image_requests    answers what a function asks about the files there

Other rooms import functions, image_requests.
"""
