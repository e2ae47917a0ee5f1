"""What the ranks of a job do, which of them hang or have died, and what is done about it.

    states = current_job().monitor.collect()     # a RankState per rank of the job; takes seconds at most

Each process has a thread that answers such questions, also while the program is in its own code, asleep or
blocked in MPI. The engine reports its long waits to `threads/wait_registry.py`, and knows no more of this.

    rank_state         what one rank does, and its form for travelling
    rank_snapshot      this process's own state
    process_inspector  a process that does not answer, seen from outside
    shm_mailbox        questions and answers among the ranks of a host; mpi_mailbox: between hosts
    mailbox_pages      the same as other processes see it, such as `mpisgd top` (`tools/cli/job_finder.py`)
    state_collector    the states of all ranks
    hang_report        what all ranks do, in words
    idle_threads       which threads of a process do nothing until another one has them do it
    step_counter       how many steps a program has made, in words that others of the host see
    console            one rank of a host prints at a time
    deadlock_detector  ends waits that can never end otherwise
    watchdog           long waits: a warning, in the end an error or the end of the job; `StallMonitor` is the
                       thread that answers, and that calls it and the deadlock detector

    failure_detector   notices lost ranks and ends the waits for them; ends all ranks
    heartbeat          how hosts notice that another one is dead: period and timeout are there
"""
