"""The fault matrix of README.md, row by row.

oracle                 judges a run directory and what was paid
strace                 kills or fails a process at a chosen system call
test_process           death of single processes
test_group_kills       death of whole process groups
test_sweep             a kill at each system call that writes
test_resume            a kill while resuming
test_interrupted_calls a kill during tool calls
test_concurrency       several commands at once
test_disk              full, broken and slow disks
test_links             links in run directories, modes of files
test_bit_flips         flipped bits
test_machine           clocks, memory, file descriptors
test_input             bad input
test_endpoint_faults   every fault of an endpoint, in whole runs
test_upkeep            kills of the commands that maintain a run
"""
