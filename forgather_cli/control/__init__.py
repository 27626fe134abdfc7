"""``forgather control``: commands to a running job, from another terminal to all of its ranks and back.

    client.py          the command line's side: HTTP requests, and waiting for a command's answer
    registry.py        where it finds jobs: the address and token of each, in the user's config directory
    server.py          HTTP in rank 0, in a thread of its own
    accept.py          how it takes connections
    command_queue.py   commands of one job, from the server's threads to rank 0's main thread
    command_record.py  one command and its state, in HTTP and in RUN/control/<id>.json

All ranks agree on commands in ``trainer.step_sync``; ``callbacks.control`` starts the server and answers commands.
"""
