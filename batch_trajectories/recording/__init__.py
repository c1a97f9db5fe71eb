"""Record the model calls of programs that others run: the command `record`.

upstream   the models that may be asked; the limits and the budget of a single process
sessions   the sessions of a recording as rows of its dataset
recording  one start, from config to the end of all sessions
recorder   the server; how sessions begin, end and survive a crash

Other rooms import recording, upstream.
"""
