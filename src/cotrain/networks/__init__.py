"""Networks: routing networks, and the shared bottom that is one of them.

The tables say what can be chosen by name: an options dataclass each, imported when it is chosen.
"""

NETWORKS = {
    "routing-network": "cotrain.networks.routing_network:RoutingNetwork",
    "shared-bottom": "cotrain.networks.shared_bottom:SharedBottom",
}
ROUTERS = {
    "task-matrix": "cotrain.networks.routers.task_matrix:TaskMatrixOptions",
    "fixed": "cotrain.networks.routers.fixed:FixedOptions",
    "input": "cotrain.networks.routers.by_input:ByInputOptions",
    "columns": "cotrain.networks.routers.columns:ColumnsOptions",
}
SAMPLINGS = {
    "gaussian": "cotrain.networks.routers.sampling:GaussianOptions",
    "noisy-top-k": "cotrain.networks.routers.sampling:NoisyTopKOptions",
    "gumbel": "cotrain.networks.routers.sampling:GumbelOptions",
    "none": "cotrain.networks.routers.sampling:NoneOptions",
}
