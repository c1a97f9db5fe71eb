"""The server of `view`: a page for all runs, alive, where people decide what is training data.

serving       listens on an address and prints it
server        addresses of the server, errors
guard         who may call
api           the answers
events        server-sent events
runs          places, keys of runs, the list of runs
state         what is kept of runs that are looked at
index/        facts of records as columns
conversation  one record: training row, requests, siblings
live          conversations in flight
labels        what people decide
page/         the page

Other rooms import serving.
"""
