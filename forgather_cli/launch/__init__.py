"""From the command to the ranks, and from the ranks' ends to the exit code.

    start.py       the run directory, then training: in this process, in ranks started here, or as one rank of others'
    run_lock.py    one job at a time in a run directory
    layout.py      how many ranks, on which nodes; place.py  which of them this process is
    memory.py      refuses models that no rank could hold, before anything is built
    supervise.py   the launcher while its ranks train; agent.py  torchrun's agent inside it; job.py  the job folder
    rank.py        one rank from start to end; context.py  what its parts share; rank_log.py  its log
    signals.py     stop signals; failures.py  what becomes of an error, and the threads that watch for other ranks'
    rendezvous.py  messages between ranks, in a store; stacks.py  where ranks stand; hang.py  runs without progress
    exit_status.py how a rank and a run ended, exit.json; error_report.py  how that is shown; processes.py  OS processes

How a fact gets from where it happens to those that act on it:

    what                  happens in       by                                                  to
    a stop signal         the launcher     ``stop`` in the job folder (job.py)                 its ranks
                          a rank           the step sync, an all-reduce of the trainer         all ranks
    a failure             a rank           ``failed/...`` in the ranks' store (rendezvous.py)  the other ranks
    how a rank ended      a rank           ``status-<rank>`` in the job folder                 its launcher
    a rank's death        the kernel       waitid                                              its launcher
                                           a broken connection, or torchrun's SIGTERM: then    the other ranks
                                           they check whether the processes of their node live
    the launcher's death  the kernel       the signal set by PR_SET_PDEATHSIG (processes.py)   its ranks
    a trainer's death     the kernel       a pipe that it held open (data/loaders/workers.py)  its data workers
    where a rank stands   a rank, asked    ``stands/<rank>`` in the ranks' store               the rank that asks
    how the run ended     rank 0, or the   ``RUN/exit.json`` (exit_status.py)                  everybody else
                          launcher

The ranks' store is a folder if our launcher has started all of them on one node, else a TCPStore with signed messages.
A rank's exit code only tells torchrun's agent whether to restart the ranks: after SIGTERM it is 0, and the launcher,
which has read the ranks' status, exits with 75. Slurm restarts no rank: under it they exit
with the code of the run.
"""
