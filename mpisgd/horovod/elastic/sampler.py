"""`ElasticSampler`, which is mpisgd's own: Horovod's arguments, attributes and numbers."""

from mpisgd.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
