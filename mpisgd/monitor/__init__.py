"""What are the others doing? Any rank can ask all others at any time, whatever their programs do meanwhile.

    watch = current_job().watch
    for view in watch.ask():          # a RankState per rank of the job; takes seconds at most
        print(view.rank, view.state, view.waits, view.stacks)

Each process has a thread that answers, also while the program is in its own code, asleep or waiting in MPI;
it sleeps until somebody asks. On a host, question and answer are words of shared memory. Between hosts they
are messages on a communicator of their own, which the thread looks for once a second; a rank of the other
host gathers what its host's ranks say. Who does not answer is described from outside: whether the process
runs, was stopped or is gone, and, where it runs but does not let Python's threads run, its Python stacks, by
a signal that dumps them without the interpreter's lock.

    waits     what the threads of this process wait for: long waits note themselves, short ones pay nothing
    view      what one rank does, and its text form
    look      this process's own view
    board     question and answer on a host
    outside   a process that does not answer
    post      question and answer between hosts
    guard     what comes before and after
    table     what all ranks do, in words
    voice     one rank says it, not all
    stalls    long waits: a warning, in the end an error or the end of the job
    watch     all of it together: the thread, and `StallMonitor.ask`
"""
