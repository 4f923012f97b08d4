"""The table of figures: what draws each, what it shows, what to look for, and which figure of the paper it answers."""

from typing import NamedTuple


class Entry(NamedTuple):
    """A figure in words, and the function that draws it: of a table, or of each benchmark of a table."""

    title: str
    paper: str
    look: str
    draw: str  # "package.module:function"
    each_benchmark: bool = False


FIGURES = {
    "accuracy": Entry(
        "Accuracy on two tasks as others are learned after them",
        "Figure 2",
        "A flat line is a task that is not forgotten. Where a line starts tells how well the task was learned, which"
        " the paper grants to the shared bottom. Lines are means over seeds, bands one standard deviation.",
        "cotrain.report.figure:accuracy",
    ),
    "drop": Entry(
        "Drop in accuracy of each task, from just learned to the end",
        "Figure 3",
        "The lower the better. Early tasks have had more time to be forgotten; a task that ends better than it began is"
        " below 0. Means over seeds and one standard deviation.",
        "cotrain.report.figure:drop",
    ),
    "routing": Entry(
        "Routing matrix of each layer",
        "Figure 4",
        "A row is a task, a column an expert, a shade its gate; after the last task, unless a slider says otherwise."
        " Experts are in the order in which tasks claimed them, which is free since experts are alike. Tasks that share"
        " columns share experts; columns without any shade were never claimed. One run is one seed: another looks"
        " different.",
        "cotrain.report.figure:routing",
        each_benchmark=True,
    ),
    "similarity": Entry(
        "Task similarity of each layer: the routing matrix times its transpose",
        "Figure 5",
        "Shade away from the diagonal is tasks that share experts. The paper sees blocks along the diagonal for"
        " rotations; for permutations there is no order to be found. The table of rank correlations says it in a"
        " number, over all seeds.",
        "cotrain.report.figure:similarity",
        each_benchmark=True,
    ),
    "router": Entry(
        "Routes through the network",
        "Figure 1, which draws a router in general; these are the routes of a run",
        "Each circle is an expert. A task's input passes through the experts that its row of the router chooses; the"
        " wider the line, the larger the gate, and Σ is their weighted sum. Compare which experts two tasks share.",
        "cotrain.report.figure:router",
        each_benchmark=True,
    ),
    "used": Entry(
        "Experts in use after each task",
        "no figure of it; it says that without co-training experts stay unused",
        "What is below the dashed line at the top is unused: capacity that no task has claimed. If the paper is right,"
        " co-training claims more of it, task by task. Means over seeds, bands one standard deviation.",
        "cotrain.report.figure:used",
    ),
    "sharing": Entry(
        "Shared experts against forgetting",
        "no figure of it; it says that tasks with experts of their own are protected",
        "A dot is a task of a run. If sharing caused forgetting, dots to the right would be higher among tasks of one"
        " shade. ρ is the rank correlation, mean over seeds; “given place” holds the task's place in the sequence"
        " fixed, since early tasks have more time to be forgotten. A correlation is not a cause.",
        "cotrain.report.figure:sharing",
    ),
}
