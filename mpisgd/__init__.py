"""mpisgd: distributed SGD with torch over MPI.

    import mpisgd

    mpisgd.init()
    model = ...
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                            named_parameters=model.named_parameters())

Importing the package starts no MPI and loads neither torch nor mpi4py: every public name is looked up on
first use.
"""

from mpisgd.lazy_names import look_up_in, modules_of_names

__version__ = "0.1.0"

_MODULE_OF = modules_of_names(__file__)

__all__ = sorted(name for name, module in _MODULE_OF.items() if module != __name__)  # no subpackages
__getattr__ = look_up_in(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return [*sorted(_MODULE_OF), "__version__"]
