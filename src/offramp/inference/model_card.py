"""The README.md of a model folder: what it is, how to use it, what it costs and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offramp.inference.operating_points import OperatingPoints
from offramp.inference.run_folder import LoadedRun


def _public(name: str) -> str:
    """A path without the folders of one machine; names on a hub stay as they are."""
    return "/".join(Path(name).parts[-2:]) if name.startswith(("/", "~")) else name


def _example(columns: tuple[str, ...]) -> str:
    """An input as `predict` takes it."""
    shown = ['["some", "words"]' if column == "tokens" else f'"some {column.split("_")[0]}"' for column in columns]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def _chosen(points: OperatingPoints) -> str:
    """How far the numbers can be trusted on other rows."""
    if "search_rows" in points.data:
        return f"settings were searched on {points.data['search_rows']} other rows of it and scored on these."
    return "no setting is promised more than dearer ones reached, so that the table holds on new rows too, on average."


def _layers(model: LoadedRun) -> str:
    """What a method tells of its layers, if it does."""
    told = model.method.about(model.network)
    listed = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in told.items())
    return f"\nLayer by layer: {listed}.\n" if told else ""


def render_model_card(model: LoadedRun, points: OperatingPoints, recipe: dict[str, Any]) -> str:
    """A model card with the table of operating points."""
    task = model.network.task
    rows = "\n".join(
        f"| {p.mac_share:.3f} | {p.score:.4f} | {p.mean_exit_layer:.2f} | `{p.settings}` |" for p in points.points
    )
    return f"""---
library_name: offramp
pipeline_tag: {task.pipeline}
base_model: {_public(model.base_model)}
metrics:
- {points.metric}
tags:
- early-exit
- {model.method.name}
---

# {model.method.name} on {_public(recipe["train"])}

{model.method.summary}

```python
import offramp

model = offramp.load("PATH/TO/THIS/FOLDER")
model.predict([{_example(task.input_columns)}], budget=0.5)  # share of the full model's compute
```

Plain `transformers` opens the same folder and gets {"the full model" if model.method.hf_equal else "the backbone"}.
{_layers(model)}
## Operating points

Measured on {points.data["rows"]} rows of {_public(points.data["name"])};
{_chosen(points)}

| share of full MACs | {points.metric} | mean exit layer | settings |
|---|---|---|---|
{rows}

How it was trained: `recipe.yaml`.
"""
