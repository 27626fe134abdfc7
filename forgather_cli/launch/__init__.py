"""From the command to the ranks, and what is known of how they ended.

    start.py       the run directory, then this process, our ranks, or a world that others have started
    claim.py       one job at a time in a run directory; layout.py  how many ranks, where; place.py  which one this is
    supervise.py   the launcher while its ranks train; agent.py  torchrun's part of it; job.py  their common folder
    watch.py       a rank's threads that look after it; rendezvous.py  what ranks of one world tell each other
    signals.py     stop signals; failures.py  what becomes of an error; exit_status.py  how it ended
    report.py      errors as users see them; rank_log.py  what a rank prints; process_group.py, orphans.py, exits.py

The process of one rank is ``rank.py``, beside this package.
"""
