"""Models whose tensors are divided by the names of their dimensions, over a grid of ranks.

layout = mpisgd.layout("batch:dp; hidden:tp; vocab:tp", mesh="dp:2, tp:2")
model = layout.distribute(model, {"up.weight": ("hidden", "model")}, inputs=("batch", "model"))
"""
