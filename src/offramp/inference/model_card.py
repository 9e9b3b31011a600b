"""The README.md of a run folder: what it is, how to use it, what it costs and scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offramp.inference.operating_points import AGREEMENT, EXACT, OperatingPoint, OperatingPoints
from offramp.inference.run_folder import LoadedRun
from offramp.tasks import Task
from offramp.utils.command_line import short_path
from offramp.utils.files import write_text

CARD_FOLDER = "PATH/TO/THIS/FOLDER"  # what cards load; an upload to the hub names the repository instead


def _example_input(task: Task) -> str:
    """Return an input as `predict` takes it."""
    listed = '["some", "words"]'
    shown = [listed if name == task.words else f'"some {name.split("_")[0]}"' for name in task.input_columns]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def _how_chosen(points: OperatingPoints) -> str:
    """Return a sentence about how far the numbers can be trusted on other rows."""
    if "search_rows" in points.data:
        return f"settings were searched on {points.data['search_rows']} other rows of it and scored on these."
    return "no setting is promised more than costlier ones reached, so that on average the table holds on new rows too."


def _largest_loss(point: OperatingPoint) -> str:
    """Return the bound on what a point loses, in points of the metric."""
    return "–" if point.loss_upper is None else f"{100 * point.loss_upper:.2f} points"


def _how_bounded(points: OperatingPoints) -> str:
    """Return what the bounds in the table promise, or why there are none."""
    bounds = points.bounds
    if bounds is None or bounds.rows is None:
        return f"Losses are estimates: {points.metric} has no confidence bound here.\n"
    sure = f"with {100 * bounds.confidence:g} % confidence"
    return (
        f"“Loses at most”: the point that a `max_loss` fixed beforehand chooses loses no more than this, {sure},\n"
        f"against the full model on new rows of the same kind ({bounds.rows} rows measured).\n"
    )


def _layers(model: LoadedRun) -> str:
    """Return the numbers that a method reports of its layers, if any."""
    numbers = model.method.about(model.network)
    listed = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in numbers.items())
    return f"\nLayer by layer: {listed}.\n" if numbers else ""


def write_model_card(folder: Path, model: LoadedRun, points: OperatingPoints, recipe: Mapping[str, Any]) -> None:
    """Write the card of a run; a folder without a recipe was not trained here and keeps its own README.md."""
    if recipe:
        attached = points.metric == AGREEMENT and "summary" in recipe
        render = render_attached_card if attached else render_model_card
        write_text(folder / "README.md", render(model, points, recipe))


def render_attached_card(model: LoadedRun, points: OperatingPoints, recipe: Mapping[str, Any]) -> str:
    """Return the card of a model with attached exits: what was attached and what it costs."""
    task, summary, tested = model.network.task, recipe["summary"], points.disagreements[0].rows
    exits = ", ".join(str(layer) for layer in summary["exits"])
    return f"""---
library_name: offramp
pipeline_tag: {task.pipeline}
base_model: {short_path(model.base_model)}
tags:
- early-exit
- attached-exits
---

# {short_path(model.base_model)} with attached exits

The model itself is unchanged: plain `transformers` opens this folder as exactly the model that went in. Offramp
attached exits after layers {exits} (0: the embeddings), which learned the model's own answers on {summary["texts"]}
unlabelled texts.

```python
import offramp

model = offramp.load("{CARD_FOLDER}")
model.predict([{_example_input(task)}], max_disagreement=0.01)
```

## What it costs

Measured on {tested} held-out texts: how often an answer differs from the full model's, and the share of
the full model's multiply-accumulates. Each bound holds with 95 % confidence for texts from the same source.

{_disagreements(points)}
How it was attached: `recipe.yaml`.
"""


def _disagreements(points: OperatingPoints) -> str:
    """Return the table of points for a disagreement with the full model."""
    rows = "".join(
        f"| {100 * p.limit:g} % | {100 * p.found:.2f} % | {'proven' if p.proven else 'an estimate'}, "
        f"≤ {100 * (p.upper or 1.0):.2f} % | {p.mac_share:.3f} | {p.mean_exit_layer or 0.0:.2f} | "
        f"{p.engine or 'torch'} {p.precision or EXACT} |\n"
        for p in points.disagreements
    )
    head = "| disagreement allowed | found | bound | share of full MACs | mean exit layer | tested on |"
    return f"{head}\n|---|---|---|---|---|---|\n{rows}"


def render_model_card(model: LoadedRun, points: OperatingPoints, recipe: Mapping[str, Any]) -> str:
    """Return a model card with the table of operating points."""
    task = model.network.task
    rows = "\n".join(
        f"| {p.mac_share:.3f} | {points.shown_score(p.score):.4f} | {_largest_loss(p)} | {p.mean_exit_layer:.2f} | "
        f"`{p.settings}` |"
        for p in points.points
    )
    return f"""---
library_name: offramp
pipeline_tag: {task.pipeline}
base_model: {short_path(model.base_model)}
metrics:
- {points.metric}
tags:
- early-exit
- {model.method.name}
---

# {model.method.name} on {short_path(recipe["train"])}

{model.method.summary}

```python
import offramp

model = offramp.load("{CARD_FOLDER}")
model.predict([{_example_input(task)}], budget=0.5)  # share of the full model's compute
```

Plain `transformers` opens the same folder and gets {"the full model" if model.method.hf_equal else "the backbone"}.
{_layers(model)}
## Operating points

Measured on {points.data["rows"]} rows of {short_path(points.data["name"])};
{_how_chosen(points)}
{_how_bounded(points)}
| share of full MACs | {points.metric} | loses at most | mean exit layer | settings |
|---|---|---|---|---|
{rows}
{_more_points(points)}
How it was trained: `recipe.yaml`.
"""


def _more_points(points: OperatingPoints) -> str:
    """Return the points that texts without labels have found, if any."""
    if not points.disagreements:
        return ""
    return f"\nHow often an answer may differ from the full model's:\n\n{_disagreements(points)}"
