"""What all rooms use: errors, text, JSON, checks of values, processes.

errors         errors of tools, of the machine and of runs, with their exit codes
text           cutting and decoding text
exact_json     JSON with integers of any size; how deep it is nested
validation     checks values, as URLs; describes what pydantic rejected
option_names   names of options that are gone, and those of other programs
yaml_file      reads YAML files; its errors name line and column
presets        files that come with the program, by name
locked         a lock that processes of this machine wait for
closing        closing several resources of which one may fail
per_loop       resources that the conversations of an event loop share
console        messages, results and progress for the user
parts          long work in several processes
buckets/       objects at URLs
startup        settings of a process: limits, logging, life and privacy
first_process  reaping orphans as process 1 of a container
requirements   what to do where the program is started without its dependencies

Other rooms import all modules.
"""
