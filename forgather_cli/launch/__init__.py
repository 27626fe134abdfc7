"""From the command to the ranks, and what is known of how they ended.

    start.py      the run directory, then this process, our ranks, or a world that others have started
    run_lock.py   one job at a time in a run directory; layout.py  how many ranks, where; place.py  which one this is
    supervise.py  the launcher while its ranks train; agent.py  torchrun's part of it; job.py  their common folder
    rank.py       one rank from start to end; context.py  what its parts share; rank_log.py  what it prints
    rendezvous.py what ranks tell each other, in a store; stacks.py  where they stand; hang.py  when nothing goes on
    signals.py    stop signals; failures.py  what becomes of an error, and the threads that watch for one
    exit_status.py how a rank and a run ended, exit.json; error_report.py  how it is shown; processes.py  the system's

How a fact gets from where it happens to who must know:

    what                  happens in       goes by                                             to
    a signal to stop      the launcher     ``stop`` in the job's folder                        its ranks
                          a rank           the step sync, an all-reduce of the trainer         all ranks
    a failure             a rank           ``failed/...`` in the ranks' store                  the other ranks
    how a rank ended      a rank           ``status-<rank>`` in the job's folder               its launcher
    a rank's death        the kernel       waitid                                              its launcher
                                           a broken connection, or torchrun's SIGTERM: then    the other ranks
                                           they look whether the processes of their node live
    the launcher's death  the kernel       the death signal that a rank asks for               its ranks
    where a rank stands   a rank, asked    ``stands/<rank>`` in the ranks' store               the rank that asks
    how the run ended     rank 0, or the   ``RUN/exit.json``                                   everybody else
                          launcher

The ranks' store is a folder where our launcher has started all of them on one node, else a TCPStore in which messages
are signed. Exit codes of ranks tell torchrun alone, and only whether it is to start them again.
"""
