"""What an agent's calls become: conversations.

repeats  which recorded reply an agent repeats
threads  the fold of an agent's calls into threads
lines    the conversations that the threads make up
"""
