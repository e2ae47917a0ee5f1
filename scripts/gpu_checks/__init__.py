"""What `./scripts/gpu_check` does: check mpisgd on the GPUs of this machine, and measure it there.

    main.py        the command: runs everything, one job after the other
    catalog.py     the checks: names, properties, how each is run
    jobs.py        a job under mpirun with a time limit, and what is made of its end
    rank.py        the program of each rank of such a job
    gpu.py         the device: CUDA's, or the simulated one of tests/simulated_gpu
    finding.py     what a check has found
    suite.py       tests/gpu as a check
    benches.py     `bench collectives` and `bench step`
    machine.py     versions, driver, GPUs, MPI
    report.py      all of it as text and as JSON

The checks themselves are functions of a `Gpu` that every rank calls, in a file for each thing that they look
at. One of its own raises no error where mpisgd is wrong: it returns a `Finding` that says so.
"""
