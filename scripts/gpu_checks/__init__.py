"""What `./scripts/gpu_check` does: check mpisgd on the GPUs of this machine, and measure it there.

    main.py        the command: runs everything, one job after the other
    catalog.py     the checks: names, properties, how each is run
    jobs.py        a check, tests/gpu or a bench as a job with a time limit, and what is made of its end
    rank.py        the program of each rank of such a job
    gpu.py         the device: CUDA's, or the simulated one of tests/simulated_gpu; what a check has found
    machine.py     versions, driver, GPUs, MPI
    report.py      all of it as text and as JSON

The checks themselves are functions of a `Gpu` that every rank calls, in streams.py, trainings.py and
endings.py. One of its own raises no error where mpisgd is wrong: it returns a `Finding` that says so.
"""
