"""Learners and results in notebooks: their HTML, by hand, and a real notebook that shows them and how far a run is."""

import ast
import json
import os
import re
import sys
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
from conftest import OPTIONS, STREAM, leaves, make, routed
from nbclient import NotebookClient

import cotrain
from cotrain import Result, Results, Spec
from cotrain.experiments.progress import Display, Done
from cotrain.methods.finetune import Finetune
from cotrain.networks.routers.task_matrix import TaskMatrix

NAN = float("nan")
HEAT, CURVE = "accuracy after each task, on each task", "mean accuracy on the tasks so far, after each task"
TWO_TASKS = [[0.5, NAN], [0.25, 0.75]]


def result(accuracy, seed=0, initial=None):
    """A result as one reads it from files: with no learner."""
    accuracy = np.array(accuracy, float)
    initial = np.full(accuracy.shape[1], NAN) if initial is None else np.array(initial)
    return Result(seed, accuracy, initial, (), (), 10, {})


def drawn(shown):
    """The tree of what somebody shows, which is XML too."""
    return ElementTree.fromstring(shown._repr_html_())


def title(shown):
    return drawn(shown).find("strong").text


def table(shown):
    return {name.text: value.text for name, value in drawn(shown).iter("tr")}


def figures(shown):
    """What the figures tell of their cells or points, by the figures' names."""
    found = {svg.get("aria-label"): [one.text for one in svg.iter("title")] for svg in drawn(shown).iter("svg")}
    assert list(found) == [one.text for one in drawn(shown).iter("small")]
    return found


def words(shown):
    """All that is written in the figures."""
    return [one.text for one in drawn(shown).iter("text")]


def learner(network, lr=0.1, **options):
    return cotrain.Learner(cotrain.finetune(network, lr=lr), **options)


# Results


def test_a_result_by_hand():
    one = result(TWO_TASKS)
    assert title(one) == "Results of seed 0"
    assert table(one) == {"acc": "0.500", "bwt": "-0.250", "learning accuracy": "0.625", "forgetting": "0.250"}
    assert figures(one) == {
        HEAT: ["after task 0, on task 0: 0.500", "after task 1, on task 0: 0.250", "after task 1, on task 1: 0.750"],
        CURVE: ["after task 0: 0.500", "after task 1: 0.500"],
    }
    assert words(one) == ["0.50", "0.25", "0.75", *"0101", "0.4", "1.0", *"01"]
    [line] = drawn(one).iter("polyline")
    height = f"{9 + (1 - 0.5) / (1 - 0.4) * (122 - 9):.1f}"  # the axis is from 0.4 at 122 to 1 at 9
    assert line.get("points") == f"40.0,{height} 242.0,{height}"


def test_several_seeds_by_hand():
    both = Results([result(TWO_TASKS, 4), result([[0.7, NAN], [0.65, 0.95]], 1)])
    assert title(both) == "Results of seeds 4, 1"
    assert table(both) == {
        "acc": "0.650 ± 0.212",  # of 0.5 and 0.8
        "bwt": "-0.150 ± 0.141",
        "learning accuracy": "0.725 ± 0.141",
        "forgetting": "0.150 ± 0.141",
    }
    assert figures(both) == {
        HEAT: ["after task 0, on task 0: 0.600", "after task 1, on task 0: 0.450", "after task 1, on task 1: 0.850"],
        CURVE: ["after task 0: 0.600 ± 0.141", "after task 1: 0.650 ± 0.212"],
    }
    [band], [line] = drawn(both).iter("polygon"), drawn(both).iter("polyline")
    corners = (40, 0.6), (242, 0.65), (40, 0.7414), (242, 0.8621), (242, 0.4379), (40, 0.4586)
    points = [f"{x:.1f},{9 + (1 - y) / (1 - 0.4) * (122 - 9):.1f}" for x, y in corners]
    assert line.get("points").split() == points[:2]
    assert band.get("points").split() == points[2:]


def test_tasks_to_come_that_were_tested_show_forward_transfer():
    one = result([[0.5, 0.4], [0.25, 0.75]], initial=[0.3, 0.1])
    assert table(one)["forward transfer"] == "0.300"
    assert len(figures(one)[HEAT]) == 4


def test_tasks_that_were_learned_together_have_one_row_and_no_curve():
    one = result([[0.5, 0.7, 0.9]])
    assert table(one) == {"acc": "0.700", "learning accuracy": "0.700"}
    assert figures(one) == {HEAT: [f"after task 2, on task {i}: 0.{5 + 2 * i}00" for i in range(3)]}


def test_one_task_has_no_curve():
    assert table(result([[0.5]])) == {"acc": "0.500", "learning accuracy": "0.500"}
    assert figures(result([[0.5]])) == {HEAT: ["after task 0, on task 0: 0.500"]}


def test_of_runs_that_were_stopped_there_is_what_was_tested():
    stopped = [[0.5, NAN, NAN], [0.25, 0.75, NAN], [NAN, NAN, NAN]]
    assert table(result(stopped)) == {}
    assert figures(result(stopped)) == figures(result(TWO_TASKS))
    whole = result([[0.7, NAN, NAN], [0.65, 0.95, NAN], [0.5, 0.5, 0.5]], 1)
    found = figures(Results([result(stopped), whole]))
    assert found[CURVE] == ["after task 0: 0.600 ± 0.141", "after task 1: 0.650 ± 0.212"]
    assert len(found[HEAT]) == 3
    assert figures(result(np.full((3, 3), NAN))) == {HEAT: []}


def test_runs_of_other_numbers_of_tasks_have_a_table_alone():
    both = Results([result(TWO_TASKS), result([[0.75]], 1)])
    assert table(both) == {"acc": "0.625 ± 0.177", "learning accuracy": "0.688 ± 0.088"}
    assert figures(both) == {}


def test_no_results():
    assert title(Results()) == "No results"
    assert table(Results()) == figures(Results()) == {}


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_the_ends_of_the_scale(accuracy):
    one = Results([result(np.where(np.tri(3) > 0, accuracy, NAN), seed) for seed in (0, 1)])
    [line] = drawn(one).iter("polyline")
    assert {point.split(",")[1] for point in line.get("points").split()} == {"9.0" if accuracy else "122.0"}
    [_frame, *cells] = drawn(one).iter("rect")
    assert [float(cell.get("fill-opacity")) for cell in cells] == [0.25 + 0.5 * accuracy] * 6


# Learners


def test_a_learner_by_hand():
    """Task t has experts t and t + 1 of its fixed router, alike."""
    one = cotrain.Learner(make(("cotraining", "fixed")).method, 7, finished=1, step=2)
    assert title(one) == "Learner"
    assert list(table(one).items())[:-1] == [
        ("method", "Cotraining around Replay"),
        ("network", "1 layer with 2 of 4 experts, chosen by Fixed; a head for each task"),
        ("inputs", "2 × 3, of 3 classes"),
        ("tasks", "1 of 3 finished, and 2 minibatches of the next"),
        ("seed", "7"),
    ]
    routes = [f"task {task}, expert {expert}: 0.500" for task in range(3) for expert in (task, task + 1)]
    assert figures(one) == {"routes of layer 0: experts of each task": routes}
    assert words(one) == ["0.50"] * 6 + [*"0203"]


def test_the_routes_are_those_of_predictions():
    one = learner(routed(STREAM.spec, cotrain.dense(3), layers=3, experts=[5, 1, 4], k=[3, 1, 2]), seed=3)
    assert table(one)["network"].startswith(
        "3 layers with 3 of 5 experts and one expert and 2 of 4 experts, chosen by "
    )
    first, last = (
        [f"task {task}, expert {expert}: {gates[task, expert]:.3f}" for task, expert in np.argwhere(gates > 0)]
        for gates in one.routes
    )
    assert figures(one) == {f"routes of layer {i}: experts of each task": told for i, told in ((0, first), (2, last))}
    assert (len(first), len(last)) == (3 * 3, 3 * 2)


@pytest.mark.parametrize(
    ("network", "told", "parameters"),
    [
        ("shared_bottom", "1 layer with one expert; a head for each task", 12 * 7 + 3 * 3 * 13),
        ("by_input", "1 layer with 2 of 4 experts, chosen by ByInput; one head", 4 * 12 * 7 + 3 * 13 + 2 * 4 * 6),
    ],
)
def test_where_no_task_has_a_route_none_is_shown(network, told, parameters):
    one = cotrain.Learner(make(("replay", network)).method)
    assert (table(one)["network"], table(one)["parameters"]) == (told, str(parameters))
    assert figures(one) == {}


def test_a_run_that_was_stopped_leaves_what_says_how_far_it_is():
    class Stops(cotrain.Callback):
        def after_chunk(self, watch):
            if (watch.task, watch.step) == (1, 16):
                watch.stop()

    options = OPTIONS | {"progress": False, "callbacks": [Stops()]}
    [one] = cotrain.run(make(("finetune", "shared_bottom")), STREAM, **options)
    assert figures(one) == {HEAT: [f"after task 0, on task 0: {one.accuracy[0, 0]:.3f}"]}
    assert table(one) == {}
    assert table(one.learner)["tasks"] == "1 of 3 finished, and 16 minibatches of the next"
    assert table(one.learner)["parameters"] == str(
        sum(leaf.size for leaf in leaves(one.learner.state.learner.parameters))
    )


# Names, sizes, text

HOSTILE = "</td><script>alert('1')</script>&amp;\"<b x='"


def test_names_are_text_whatever_they_are():
    class Router(TaskMatrix):
        pass

    class Method(Finetune):
        pass

    options = {"layers": 1, "experts": 4, "k": 2}
    plain = learner(routed(STREAM.spec, cotrain.dense(3), **options))
    router = Router(**vars(plain.network.router))
    network = cotrain.routing_network(STREAM.spec, cotrain.dense(3), router=router, **options)
    one = cotrain.Learner(Method(network, plain.method.rates, plain.method.optimizer))
    Router.__name__ = Method.__name__ = HOSTILE
    assert table(one)["method"] == HOSTILE
    assert table(one)["network"] == f"1 layer with 2 of 4 experts, chosen by {HOSTILE}; a head for each task"
    assert {part.tag for part in drawn(one).iter()} == {part.tag for part in drawn(plain).iter()}


def test_it_is_small():
    """A cell or point takes less than 150 bytes, its number another 100, if there is room for it; all else, 3,000.

    So the paper's results and learner take less than 40,000, as a small picture does, and nothing more than 1.6 MB.
    """
    for tasks in (1, 2, 10, 20, 100):
        results = Results([result(np.where(np.tri(tasks) > 0, 0.9, NAN), seed) for seed in range(15)])
        network = routed(Spec((6,), 3, tasks), cotrain.dense(3), layers=2, experts=20, k=4)
        for one, cells in ((results, tasks * (tasks + 1) // 2), (learner(network), 2 * 4 * tasks)):
            curve = tasks if one is results and tasks > 1 else 0
            assert sum(map(len, figures(one).values())) == cells + curve
            size = len(one._repr_html_().encode())
            assert size < 3000 + 150 * (cells + curve) + (100 * cells if tasks <= 10 else 0)
            assert size < 40_000 or tasks == 100


def test_what_is_too_much_to_draw_is_not_drawn():
    one = result(np.where(np.tri(101) > 0, 0.9, NAN))
    assert f"{HEAT}: too many to draw" in one._repr_html_()
    assert [svg.get("aria-label") for svg in drawn(one).iter("svg")] == [CURVE]
    one = learner(routed(Spec((6,), 3, 101), cotrain.dense(1), layers=1, experts=100, k=1))
    assert "routes of layer 0: experts of each task: too many to draw" in one._repr_html_()
    assert len(one._repr_html_()) < 2000


def test_a_learner_that_diverged_says_so():
    learner = cotrain.Learner(make(("finetune", "shared_bottom"), lr=1e30).method)
    with pytest.raises(cotrain.Diverged):
        learner.observe(*STREAM[0].train.take(np.arange(40)), 0)
    assert '<th style="text-align:left">what was learned</th>' in learner._repr_html_()
    assert "nothing; it diverged" in learner._repr_html_()


def test_printed_they_are_plain_text():
    both = Results([result(TWO_TASKS), result([[0.7, NAN], [0.65, 0.95]], 1)])
    assert str(both) == "acc 0.650 ± 0.212, bwt -0.150 ± 0.141, learning_accuracy 0.725 ± 0.141 (2 seeds)"
    one = cotrain.Learner(make(("finetune", "shared_bottom")).method)
    for text in (repr(both), repr(both[0]), str(both[0]), repr(one), str(one), f"{one}"):
        assert not re.search("<(div|table|svg)", text)
    assert repr(one).startswith("<cotrain.experiments.learner.Learner object at ")


@pytest.mark.parametrize("name", ["a [red]b", "a [/b]"])
def test_names_are_text_in_bars_too(name, capsys):
    with Display([name], bars=True) as display:
        display.show(name, Done(1, 2, name))
    assert capsys.readouterr().err.count(name) == 2


# A notebook

RUN = """
import os, sys
import numpy as np
import cotrain

draws = np.random.default_rng(0)
x, y = draws.normal(size=(2, 40, 6)).astype(np.float32), np.arange(40) % 3
stream = cotrain.Stream.from_arrays([(x[task], y, x[task, :30], y[:30]) for task in range(2)])
network = cotrain.routing_network(stream.spec, cotrain.dense(8), layers=1, experts=4, k=2)
method = cotrain.cotraining(cotrain.replay(network, cotrain.reservoir(20)))
results = cotrain.run(method, stream, seeds=2, chunk=1)
results
"""
BARS = """
from cotrain.experiments import progress

found = [progress.Display(["a run"]).bars is not None]
progress.find_spec = lambda name: None  # as without ipywidgets
found + [progress.Display(["a run"]).bars is not None]
"""
CELLS = [
    RUN,
    "results[0].learner",
    "cotrain.Learner(method)",
    "results[0]",
    "print(results)",
    BARS,
    "os.getpid(), sys.executable",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A notebook that was executed by this very Python, with nobody's settings."""
    place = tmp_path_factory.mktemp("jupyter")
    (place / "kernels" / "this").mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "this", "language": "python"}
    (place / "kernels" / "this" / "kernel.json").write_text(json.dumps(kernel))
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(place))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        NotebookClient(made, timeout=300, kernel_name="this").execute()
    return made


def outputs(notebook, source):
    return next(cell.outputs for cell in notebook.cells if cell.source == source)


def shown(notebook, source):
    """What a cell has as its value: its plain text, and its HTML as a tree."""
    [data] = [one.data for one in outputs(notebook, source) if one.output_type == "execute_result"]
    return data["text/plain"], ElementTree.fromstring(data["text/html"])


def row(notebook, source, name):
    """What a row of a cell's table says."""
    return {name.text: value.text for name, value in shown(notebook, source)[1].iter("tr")}[name]


def test_no_cell_fails_or_warns(notebook):
    kinds = {(one.output_type, one.get("name")) for cell in notebook.cells for one in cell.outputs}
    assert kinds == {("execute_result", None), ("display_data", None), ("stream", "stdout")}
    pid, executable = ast.literal_eval(outputs(notebook, CELLS[-1])[0].data["text/plain"])
    assert executable == sys.executable
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_results_and_learners_are_tables_and_figures(notebook):
    for source, numbers in (
        (RUN, [4, 2, 1 + 3]),
        ("results[0]", [4, 2, 1 + 3]),
        ("results[0].learner", [6, 1, 1 + 2 * 2]),
        ("cotrain.Learner(method)", [6, 1, 1 + 2 * 2]),
    ):
        text, tree = shown(notebook, source)
        assert [len(list(tree.iter(tag))) for tag in ("tr", "svg", "rect")] == numbers
        assert "<svg" not in text
    assert row(notebook, "results[0].learner", "tasks") == "2 of 2 finished"
    assert row(notebook, "cotrain.Learner(method)", "tasks") == "0 of 2 finished"
    [printed] = outputs(notebook, "print(results)")
    assert printed.text.startswith(f"acc {row(notebook, RUN, 'acc')}, bwt ")


def test_how_far_a_run_is_shows_in_a_widget(notebook):
    [widget, *ends] = [one.data for one in outputs(notebook, RUN) if one.output_type == "display_data"]
    model = widget["application/vnd.jupyter.widget-view+json"]["model_id"]
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"].state[model]
    [last] = state.state.outputs
    assert "2 of 2 finished, 0 running, 0 failed" in last.data["text/html"]
    lines = [re.sub("<.*?>", "", one["text/html"]).strip() for one in ends]
    assert lines[0] == f"[1/2] seed 0: task 2/2, accuracy {row(notebook, 'results[0]', 'acc')}"
    assert lines[1].startswith("[2/2] seed 1: task 2/2, accuracy 0.")
    assert not any("\x1b" in one["text/html"] for one in (last.data, *ends))


def test_without_widgets_there_are_no_bars(notebook):
    assert outputs(notebook, BARS)[0].data["text/plain"] == "[True, False]"
