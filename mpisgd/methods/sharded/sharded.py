"""`Sharded`: all ranks divide the optimizer's work and state among them, and with stage 2 the gradients, too.

    backward   reduce-scatter   each rank gets its shard of every bucket, averaged
    step                        each rank updates its shard of the parameters, with its shard of the state
    after it   all-gather       everyone gets everyone's parameters

N ranks compute what one process computes on the joined batch, as with `Synchronous`, and send as many bytes.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020. There, stage 1 is P_os, and stage 2 is P_os+g.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpisgd.accelerator.runtime import on_device
from mpisgd.arguments import check_flag, shown
from mpisgd.errors import InvalidArgument
from mpisgd.methods.block_quantized.block_quantized import BlockQuantized
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.sharded import paper
from mpisgd.methods.sharded.streamed import StreamedSynchronizer
from mpisgd.methods.sharded.synchronizer import ShardedSynchronizer
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_casting, needs_none, no, yes
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training, check_elementwise
from mpisgd.sharding.divided_parameters import check_divisible
from mpisgd.sharding.elementwise import is_known_elementwise
from mpisgd.sharding.layerwise.in_files import streamed_parameters_of
from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.reduction.coded_reduction import check_codable
from mpisgd.sharding.shared_parameters import check_shareable

__all__ = ["Sharded"]


SHARDED = GoesWith(
    compression=Compressions("casts", (needs_casting,)),
    share_parameters=yes(),
    named_buffers=no("buffers stay on their rank; use mpisgd.SyncBatchNorm"),
    whole_gradients=no(
        "it computes its direction from all gradients together, and each rank has those of its own parameters"
    ),
    uneven_data=yes("as one process"),
    elastic=yes("yes, with a replica of each shard"),
    checkpoint=yes("has each rank's shard"),
)
NOT_IN_FILES = no("parameters in files have their gradients reduced as they are, layer by layer")
CODED = replace(
    SHARDED,
    of="Sharded(gradients=)",
    compression=Compressions("no", (needs_none,)),
)
CODED_PARAMETERS = replace(CODED, of="Sharded(parameters=)")
IN_FILES = replace(
    SHARDED,
    compression=Compressions("no", (needs_none,)),
    op=NOT_IN_FILES,
    gradient_predivide_factor=NOT_IN_FILES,
    error_if_nonfinite=NOT_IN_FILES,
    check_in_sync_every=NOT_IN_FILES,
    share_parameters=NOT_IN_FILES,
    uneven_data=no("layers are brought from files in forward and backward, by all ranks together"),
)


@dataclass(frozen=True)
class Sharded(Strategy):
    """All ranks have the same parameters; each has the optimizer state of one shard, and updates it.

    With P parameters, n ranks and K bytes of optimizer state per parameter, each rank keeps K P / n bytes of
    state; with stage 2 it also keeps only the gradients of P / n parameters. With `share_parameters=True`
    each host has one copy of the parameters.

    Attributes:
        stage: 1: the optimizer state is divided; 2: the gradients are divided, too: those of other ranks are
            freed as soon as their bucket has been reduced. Accumulate inside `no_sync()`, which keeps all
            gradients.
        overlap_forward: whether parameters are sent while the next forward computes, first layers first. Each
            module waits for its own parameters; other code must call `optimizer.synchronizer.wait()` before
            it reads parameters after a step. Useful on a slow network. On a GPU it may need as much further
            memory as the parameters until they have arrived.
        master_dtype: the dtype in which the optimizer updates parameters of lower precision, such as
            torch.float32 for a model in torch.bfloat16; each rank keeps a copy of its shard in it. None: the
            dtype of the parameters.
        offload: keeps state in files on a disk or, for models on a GPU, in host memory; see `Offload`. Needs
            one of torch's elementwise optimizers, see `elementwise` of `DistributedOptimizer`.
        gradients: quantizes sums of gradients that are sent between hosts, such as
            `mpisgd.compress.BlockQuantized(bits=4)`; None: they are sent as they are. The ranks of a host add
            their gradients in shared memory, without quantization. For its shard each rank receives the
            quantized sums of the other hosts, and adds them to the exact sum of its own host, in the order of
            the hosts and in float32 or more. There is no error feedback: the quantization error is lost. On
            one host nothing is quantized; a rank without shared memory counts as a host. Needs parameters on
            the CPU and one of torch's elementwise optimizers, see `elementwise` of `DistributedOptimizer`.
        parameters: quantizes updated parameters that are sent between hosts, such as
            `mpisgd.compress.BlockQuantized(bits=8)`; None: they are sent as they are. All ranks compute with
            the same quantized values; the owner of a shard also keeps the exact values, and updates these. On
            one host nothing is quantized.
        secondary: only None. `share_parameters` of `DistributedOptimizer` keeps one copy per host instead.

    Source: ZeRO, Rajbhandari and others 2020; ZeRO-Offload and ZeRO-Infinity, 2021; ZeRO++, Wang and others
        2023, sections 3.1 (qwZ) and 3.3 (qgZ), here without quantization within a host.
    """

    stage: int = 1
    overlap_forward: bool = False
    master_dtype: torch.dtype | None = None
    offload: Offload | None = None
    gradients: BlockQuantized | None = None
    parameters: BlockQuantized | None = None
    secondary: None = None

    @classmethod
    def examples(cls) -> Sequence["Sharded"]:
        """See `Strategy`."""
        return (
            cls(stage=1),
            cls(stage=2),
            cls(stage=1, overlap_forward=True),
            cls(stage=2, gradients=BlockQuantized()),
            cls(stage=2, gradients=BlockQuantized(), parameters=BlockQuantized(bits=8)),
        )

    def __post_init__(self) -> None:
        """Raise InvalidArgument where a field makes no sense."""
        if self.stage not in (1, 2) or isinstance(self.stage, bool):
            raise InvalidArgument(
                f"Sharded: stage={shown(self.stage)}; expected 1 (optimizer state) or 2 (gradients, too)"
            )
        check_flag("Sharded", "overlap_forward", self.overlap_forward)
        dtype = self.master_dtype
        if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
            raise InvalidArgument(f"Sharded: master_dtype={shown(dtype)}; expected such as torch.float32")
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise InvalidArgument(
                f"Sharded: offload={shown(self.offload)}; expected None or mpisgd.Offload(folder)"
            )

        for coded in ("gradients", "parameters"):
            if getattr(self, coded) is not None:
                self._check_code(coded, getattr(self, coded))
        if self.secondary is not None:
            raise InvalidArgument(
                f"Sharded: secondary={shown(self.secondary)}: a second partition serves those who gather "
                "parameters again in backward, which nobody does here; a host keeps one copy of them with "
                "DistributedOptimizer(share_parameters=True)"
            )

    def _check_code(self, which: str, code: Any) -> None:
        if not isinstance(code, BlockQuantized):
            raise InvalidArgument(
                f"Sharded: {which}={shown(code)}; expected None or mpisgd.compress.BlockQuantized()"
            )
        if code.error_feedback:
            why = {
                "gradients": "what sums of hosts leave out is not kept",
                "parameters": "owners have what codes leave out anyway",
            }
            raise InvalidArgument(
                f"Sharded: {which}=BlockQuantized(error_feedback=True): {why[which]}; leave out "
                "error_feedback"
            )
        for name in ("offload", "master_dtype", "overlap_forward"):
            if value := getattr(self, name):
                raise InvalidArgument(f"Sharded: {which}={code} does not go with {name}={value}")

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        in_files = self.offload is not None and "parameters" in self.offload.parts
        if in_files:
            return IN_FILES
        if not self._is_coded:
            return SHARDED
        return CODED if self.gradients is not None else CODED_PARAMETERS

    @property
    def _is_coded(self) -> bool:
        return self.gradients is not None or self.parameters is not None

    def check(self, training: Training) -> None:
        """Raise if the parameters cannot be divided, or not be updated in parts."""
        super().check(training)
        if self.offload is not None:
            self._check_offload(training, self.offload)
        if self._is_coded:
            self._check_coded(training)
        if self._streamed(training) is None:
            (check_shareable if training.share_parameters else check_divisible)(training.named)
            check_elementwise(training)

    def _check_coded(self, training: Training) -> None:
        """Raise where something would have to be coded that cannot be."""
        codes = {"gradients": self.gradients, "parameters": self.parameters}
        said = ", ".join(f"{name}={code}" for name, code in codes.items() if code is not None)
        if not is_known_elementwise(training.optimizer):
            raise InvalidArgument(
                f"Sharded: {said} does not go with {type(training.optimizer).__name__}, "
                "whose step is none of torch's that update each element by itself, such as SGD's or AdamW's"
            )
        check_codable(training.named)

    def updates_files(self, training: Training) -> bool:
        """See `Strategy`."""
        return self._streamed(training) is not None

    def _check_offload(self, training: Training, offload: Offload) -> None:
        if not is_known_elementwise(training.optimizer):
            raise InvalidArgument(
                f"Sharded: offload does not go with {type(training.optimizer).__name__}, whose step is not "
                "one of torch's that update each element by itself, such as SGD's or AdamW's"
            )
        if "parameters" not in offload.parts:
            self._check_device(training, offload)
            return
        streamed = self._streamed(training)
        if streamed is None or streamed.offload != offload or streamed.group is not training.group:
            raise InvalidArgument(
                f"Sharded: {offload} needs the parameters of the optimizer in such files: call "
                "mpisgd.offload_parameters(model, offload) before, with the same group"
            )
        if self.master_dtype is not None:
            raise InvalidArgument(f"Sharded: master_dtype={self.master_dtype} does not go with {offload}")

    @staticmethod
    def _check_device(training: Training, offload: Offload) -> None:
        on_devices = any(on_device(param) for _, param in training.named)
        if offload.folder is None and not on_devices:
            raise InvalidArgument(
                "Sharded: an Offload without a folder keeps the state in host memory, where that of a model "
                "on the CPU is anyway; name a folder"
            )
        if on_devices and any(options.get("capturable") for options in training.optimizer.param_groups):
            raise InvalidArgument(
                "Sharded: capturable=True does not go with an offload, whose optimizer updates on the CPU"
            )

    def _streamed(self, training: Training) -> StreamedParameters | None:
        """Return the parameters that are in files, if they are to be."""
        if self.offload is None or "parameters" not in self.offload.parts:
            return None
        return streamed_parameters_of(training.params)

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return the working part, which reduces gradients to their owners and gathers parameters."""
        streamed = self._streamed(training)
        if streamed is not None:
            return StreamedSynchronizer(training, streamed)
        return ShardedSynchronizer(
            training,
            stage=self.stage,
            master_dtype=self.master_dtype,
            overlap_forward=self.overlap_forward,
            offload=self.offload,
            make_code=None if self.gradients is None else self.gradients.code_of,
            make_parameter_code=None if self.parameters is None else self.parameters.code_of,
        )

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any] | None:
        """Return the algorithm of what is coded, which depends on the shards; None where nothing is."""
        of_g, of_y = self.gradients, self.parameters
        g = paper.CodedGradients() if of_g is None else paper.CodedGradients(of_g.largest, of_g.block)
        if of_y is not None:
            return paper.CodedParameters(g, of_y.largest, of_y.block)
        return None if of_g is None or size == 1 else g
