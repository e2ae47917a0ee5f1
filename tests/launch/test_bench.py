"""`python -m mpisgd bench --quick`: the records hold what they promise. Nothing here looks at speed."""

import json
import os
from pathlib import Path

import pytest
import torch
from launcher import run_python

HEADER = {
    "kind",
    "command",
    "when",
    "versions",
    "size",
    "hosts",
    "machine",
    "peers",
    "peers_left_out",
    "ranks",
    "title",
}
SPREAD = {"median_s", "min_s", "max_s"}


def bench(tmp_path, *args, num_ranks=None, env=None):
    file, plot = tmp_path / "record.json", tmp_path / "plot.png"
    command, *options = args
    done = run_python(
        *("-m", "mpisgd", "bench", command, "--quick", "--json", str(file), "--plot", str(plot), *options),
        num_ranks=num_ranks,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    return done, json.loads(file.read_text())


def check_header(record, kind, num_ranks):
    assert record.keys() >= HEADER
    assert (record["kind"], record["size"], record["hosts"]) == (kind, num_ranks, 1)
    assert record["command"].startswith(f"python -m mpisgd bench {kind} ")
    assert record["machine"]["cores"] >= 1
    assert [rank["rank"] for rank in record["ranks"]] == list(range(num_ranks))
    assert record["ranks"][0]["versions"].keys() >= {"mpisgd", "Python", "torch", "mpi4py"}
    assert record["versions"].keys() == record["ranks"][0]["versions"].keys() | {"MPI"}


def check_spread(rows):
    assert rows
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]


def test_strategies_are_compared_by_accuracy_time_and_bytes(tmp_path):
    methods = "Synchronous; LocalSGD(hierarchy={'host': 2, 'job': 4}) + bf16"
    _, record = bench(tmp_path, "strategies", "--methods", methods, num_ranks=2)
    check_header(record, "strategies", 2)
    assert [row["variant"] for row in record["rows"]] == [part.strip() for part in methods.split(";")]
    for row in record["rows"]:
        assert row["accuracy"] > 0.2  # of ten classes, after two epochs
        assert row["mib_sent"] == 0  # one host
        assert len(row["curve"]) == 2
        assert row["curve"][0][0] < row["curve"][1][0] == row["median_s"]


def test_strategies_are_compared_by_the_loss_on_text_and_keep_what_they_have(tmp_path):
    adam = ["Sharded(2)", "LocalSGD(2)", "Synchronous with OneBitAdam(lr=0.003, freeze_step=2)"]
    sgd = [f"{name} with SGD(lr=0.3)" for name in ("Synchronous", "Synchronous + DeepGradient(ratio=0.1)")]
    server = "ParameterServer('ssp', staleness_steps=1)"
    table = tmp_path / "table.txt"
    options = ("--task", "text", "--methods", "; ".join([*adam, *sgd, server]), "--table", str(table))
    done, record = bench(tmp_path, "strategies", *options, num_ranks=2)
    assert record["kind"] == "strategies of text"
    rows = {row["variant"]: row for row in record["rows"]}
    assert {row["section"] for row in rows.values()} == {"text", "text, SGD"}
    assert [rows[name]["section"] for name in (*adam, *sgd)] == ["text"] * 3 + ["text, SGD"] * 2
    assert [name for name, row in rows.items() if row["loss_ratio"] == 1] == [adam[0], sgd[0]]
    assert all(
        row["loss_ratio_max"] == max(row["finals"]) / rows[adam[0]]["loss"]
        for row in rows.values()
        if row["section"] == "text"
    )
    assert all(row["bytes_ratio"] is None for row in rows.values())  # one host: nothing passes a link
    for row in rows.values():
        assert 0 < row["loss"] < 6  # log(256) is 5.5
        assert [point[3] for point in row["curve"]] == [4, 8]
    assert all(name in done.stderr for name in rows)
    assert "validation" in table.read_text()


def test_steps_of_compressions_are_compared(tmp_path):
    methods = "Synchronous; Synchronous + TopK(ratio=0.1); LocalSGD(2)"
    done, record = bench(tmp_path, "compression", "--methods", methods, num_ranks=2)
    check_header(record, "compression", 2)
    check_spread(record["rows"])
    assert [row["variant"] for row in record["rows"]] == ["no communication", *methods.split("; ")]
    assert record["rows"][1]["speed_up"] == 1
    assert "transformer: a step without any communication takes" in done.stdout


def test_a_misspelt_strategy_is_named(tmp_path):
    done = run_python("-m", "mpisgd", "bench", "strategies", "--methods", "LocalSDG(8)")
    assert done.returncode == 2
    assert "--methods: strategy 'LocalSDG(8)'" in done.stderr


def test_collectives_are_measured_beside_mpi_gloo_and_the_limit(tmp_path):
    done, record = bench(tmp_path, "collectives", "--only", "all_reduce,gather", num_ranks=2)
    check_header(record, "collectives", 2)
    check_spread(record["rows"])
    assert "gloo" in record["peers"]
    measured = {(row["collective"], row["bytes"], row["variant"]) for row in record["rows"]}
    sizes = {"all_reduce": (4, 65536), "gather": (8, 65536)}  # one element from each rank at least
    assert measured == {
        (collective, nbytes, variant)
        for collective, both in sizes.items()
        for nbytes in both
        for variant in ("mpisgd", "MPI", "gloo", "limit")
    }
    for row in record["rows"]:
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
        factor = 1.0 if row["collective"] == "all_reduce" else 0.5
        assert row["busbw_gb_s"] == pytest.approx(factor * row["algbw_gb_s"])
        assert (row["ratio_to_limit"] == 1.0) or row["variant"] != "limit"
    for text in ("all_reduce, float32", "gather, float32", "64 KiB", "bus GB/s"):
        assert done.stdout.count(text) >= 1


@pytest.mark.long
def test_algorithms_and_what_mpi_cannot_add(tmp_path):
    _, record = bench(
        tmp_path,
        *("collectives", "--only", "all_reduce", "--dtypes", "bfloat16", "--algorithms", "auto,ring"),
        *("--peers", "none"),
        num_ranks=3,
    )
    assert {row["variant"] for row in record["rows"]} == {"mpisgd", "mpisgd ring", "limit"}
    assert {entry["variant"]: entry["reason"] for entry in record["left_out"]} == {
        "MPI": "MPI has no arithmetic for bfloat16"
    }


def test_steps_are_measured_beside_no_communication_and_ddp(tmp_path):
    _, record = bench(tmp_path, "step", "--models", "deep", num_ranks=2)
    check_header(record, "step", 2)
    check_spread(record["rows"])
    assert record["models"]["deep"].keys() == {"parameters", "tensors", "batch_per_rank"}
    ratios = {row["variant"]: row["ratio_to_no_communication"] for row in record["rows"]}
    alone = [ratios.pop("none, gradients dropped"), ratios.pop("none, gradients zeroed")]
    assert min(alone) == 1.0
    one_process = [row for row in record["rows"] if row["variant"].startswith("one process")]
    assert min(row["ratio_to_one_process"] for row in one_process) == 1.0
    assert all(row["threads"] >= 1 for row in record["rows"])
    assert ratios.keys() == {
        "none, dropped, not kept",
        "none, zeroed, not kept",
        "one process",
        "one process, not kept",
        "none, in DDP's processes",
        "mpisgd",
        "mpisgd, shared parameters",
        "mpisgd, Sharded(1)",
        "mpisgd, Sharded(2)",
        "mpisgd.horovod",
        "MPI, a call per tensor",
        "DDP gloo, 25 MiB buckets",
        "DDP gloo, 100 MiB buckets",
        "DDP mpisgd, 25 MiB buckets",
        "DDP mpisgd, 100 MiB buckets",
        "FSDP2 gloo",
        "FSDP2 mpisgd",
    }


@pytest.mark.long
def test_scaling_starts_a_job_for_each_count(tmp_path):
    _, record = bench(tmp_path, "scaling", "--ranks", "2", "--models", "mlp")
    assert record["kind"] == "scaling"
    check_spread(record["rows"])
    measured = [(row["batch"] // 32, row["variant"], row["ranks"]) for row in record["rows"]]
    ranks = (("no communication", 2), ("mpisgd", 2), ("one process", 1), ("one process, not kept", 1))
    assert measured == [(n, name, min(n, most)) for n in (1, 2) for name, most in ranks]
    assert record["rows"][0]["efficiency"] == 1.0
    assert [job["size"] for job in record["jobs"]] == [1, 2]


@pytest.mark.long
def test_memory_is_compared_with_the_same_training_without(tmp_path):
    done, record = bench(tmp_path, "memory", "--models", "deep", "--ranks", "2")
    assert record["kind"] == "memory"
    assert [row["variant"] for row in record["rows"]] == [
        "none",
        "none, MPI started",
        "mpisgd",
        "mpisgd, shared parameters",
    ]
    for row in record["rows"]:
        assert 2**26 < row["min_bytes"] <= row["median_bytes"] <= row["max_bytes"]
    none, started, *_ = record["rows"]
    # MPI's libraries are files, and the baseline must not have loaded them.
    assert started["files_bytes"] > none["files_bytes"]
    assert "without mpisgd, MPI or mpi4py" in done.stdout


def test_fusion_is_measured_beside_one_call_each(tmp_path):
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "bench_fusion.py"
    options = ("--tensors", "5", "--width", "8", "--repeats", "2", "--json", str(tmp_path / "fusion.json"))
    done = run_python(str(script), *options, num_ranks=3)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "fusion.json").read_text())
    assert (record["size"], record["command"]) == (
        3,
        " ".join(["python scripts/bench/bench_fusion.py", *options]),
    )
    check_spread(record["rows"])
    ratios = {row["variant"]: row["ratio_to_fused"] for row in record["rows"]}
    assert ratios.pop("mpisgd, fused") == 1.0
    assert ratios.keys() == {
        "mpisgd.all_reduce, one call each",
        "comm.Allreduce, one call each",
        "one memcpy of all bytes",
    }


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.long
def test_muon_is_measured_beside_fsdp2(tmp_path):
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "bench_muon.py"
    small = ("--layers", "2", "--dim", "16", "--context", "8", "--repeats", "2")
    done = run_python(str(script), *small, "--json", str(tmp_path / "muon.json"), num_ranks=2)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "muon.json").read_text())
    check_spread(record["rows"])
    names = {row["variant"] for row in record["rows"]}
    assert {"FSDP2, gathered", "FSDP2 on gloo, gathered", "Synchronous", "Sharded(1)"} < names
    shares = record["shares"]  # of 12 matrices with equal work in pairs
    assert shares["Synchronous"] == 2.0
    assert max(shares[name] for name in ("Sharded(1)", "Sharded(2)", "share_parameters")) <= 1.15


def test_overlap_wants_several_hosts():
    done = run_python("-m", "mpisgd", "bench", "overlap", "--quick", num_ranks=2)
    assert done.returncode == 2
    assert "expected ranks on 2 hosts or more, found 1" in done.stderr


@pytest.mark.long
def test_a_peer_that_cannot_be_had_is_named(tmp_path):
    broken = tmp_path / "horovod"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('built for another torch')")
    done, record = bench(
        tmp_path,
        *("collectives", "--only", "all_reduce", "--peers", "horovod"),
        num_ranks=2,
        env={"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))},
    )
    assert record["peers_left_out"] == {"horovod": "ImportError: built for another torch"}
    assert done.stdout.count("left out: horovod: ImportError: built for another torch") == 1


def with_horovod(**more):
    paths = [str(Path(__file__).with_name("stand_in")), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


@pytest.mark.long
@pytest.mark.parametrize(("env", "library"), [({}, "gloo"), ({"STAND_IN_MPI": "1"}, "MPI")])
def test_horovod_is_measured_where_it_imports_and_rests_in_between(env, library, tmp_path):
    """The stand-in's thread never sleeps: the others could hardly be measured beside it."""
    _, record = bench(
        tmp_path,
        *("collectives", "--only", "all_reduce,all_to_all,gather", "--peers", "horovod"),
        num_ranks=3,
        env=with_horovod(**env),
    )
    assert record["peers"] == {"horovod": f"horovod stand-in, over {library}"}
    assert record["peers_left_out"] == {}
    measured = {row["collective"] for row in record["rows"] if row["variant"] == "horovod"}
    assert measured == {"all_reduce", "all_to_all"}
    reasons = {(entry["collective"], entry["reason"]) for entry in record["left_out"]}
    assert reasons == {("gather", "Horovod has no gather")}


@pytest.mark.long
def test_horovod_takes_training_steps_where_it_imports(tmp_path):
    _, record = bench(
        tmp_path, "step", "--models", "mlp", "--peers", "horovod", num_ranks=2, env=with_horovod()
    )
    assert "Horovod" in {row["variant"] for row in record["rows"]}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("collectives", "--only", "all_reduce,bcast"), "--only: 'bcast' is none of all_reduce"),
        (("collectives", "--sizes", "4,many"), "'many' is no size"),
        (("collectives", "--json", "/nowhere/all.json"), "cannot write /nowhere/all.json"),
        (("step", "--models", "cnn"), "--models: 'cnn' is none of mlp"),
        (("scaling", "--ranks", "two"), "--ranks: 'two'"),
        (("memory", "--models", "cnn"), "--models: 'cnn' is none of mlp"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(args, said):
    done = run_python("-m", "mpisgd", "bench", *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_does_not_end_is_ended():
    done = run_python("-m", "mpisgd", "bench", "collectives", "--time-limit", "1", num_ranks=2)
    assert done.returncode != 0
    assert "no end within 1 s" in done.stderr


@pytest.mark.long
def test_checks_are_measured_with_and_without(tmp_path):
    file = tmp_path / "record.json"
    options = ("--models", "deep,mlp", "--quick", "--json", str(file))
    done = run_python("-m", "mpisgd", "bench", "checks", *options, num_ranks=2)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert [row["model"] for row in record["rows"]] == ["deep", "deep", "mlp", "mlp"]
    for checked, bare in zip(record["rows"][::2], record["rows"][1::2], strict=True):
        assert (checked["variant"], checked["operations"]) == ("mpisgd", bare["operations"])
        assert checked["ratio_to_bare"] > 0
        assert checked["part_of_step"] == pytest.approx(
            checked["operations"] * record["one_check"]["median_s"] / checked["median_s"]
        )
    assert record["one_check"]["min_s"] > 0


FEW_STEPS = str(Path(__file__).with_name("programs") / "few_steps.py")


def test_a_program_is_run_in_every_layout_and_ends_by_itself(tmp_path):
    ended = tmp_path / "ended"
    ended.mkdir()
    done, record = bench(tmp_path, "layout", *layout_options("1,2"), "--", FEW_STEPS, "1000", str(ended))
    assert record["kind"] == "layout"
    check_spread(record["rows"])
    variants = {row["variant"]: (row["ranks"], row["threads"]) for row in record["rows"]}
    assert variants == {"1 rank x 1 thread": (1, 1), "2 ranks x 1 thread": (2, 1)}
    fastest, other = record["rows"]
    assert fastest["ratio_to_fastest"] == 1.0
    assert other["ratio_to_fastest"] == pytest.approx(other["median_s"] / fastest["median_s"])
    for row in record["rows"]:
        assert row["step_s"] == pytest.approx(row["ranks"] * row["median_s"])
    assert sorted(file.name for file in ended.iterdir()) == [
        "1 ranks, rank 0",
        "2 ranks, rank 0",
        "2 ranks, rank 1",
    ]
    assert f"fastest: {fastest['variant']}" in done.stdout
    assert "trained to the end" not in done.stdout + done.stderr


def layout_options(ranks):
    return "--ranks", ranks, "--threads", "1"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ((FEW_STEPS, "3", "/nowhere"), "exit code 0 after 3 steps, too early"),
        (("python", "-c", "raise ValueError('no data')"), "exit code 1 and has not called mpisgd.init()"),
    ],
)
def test_a_program_that_cannot_be_measured_is_named_with_the_end_of_its_output(program, said):
    done = run_python("-m", "mpisgd", "bench", "layout", "--quick", *layout_options("1"), "--", *program)
    assert done.returncode == 1
    assert "error: 1 rank x 1 thread: the program ended with " in done.stderr
    assert said in done.stderr
    assert ("trained to the end" if program[0] == FEW_STEPS else "ValueError: no data") in done.stderr
    assert "mpisgd/tools/bench" not in done.stderr
