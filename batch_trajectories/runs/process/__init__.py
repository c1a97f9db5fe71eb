"""Settings of a process: environment, limits, log, console.

startup        limits, logging, life and privacy
child_watcher  how asyncio watches child processes
first_process  reaping orphans as process 1 of a container
parts          long work in several processes
long_work      progress of long work
console        messages and results for the user
requirements   what to do where the program is started without its dependencies
"""
