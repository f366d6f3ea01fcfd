"""The options with which `fleet plan` predicts the gain from sparse attention: schedule, model, lengths, machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pcast.ground.errors import UsageError

if TYPE_CHECKING:
    from p2pcast.sparse.budget_schedule import BudgetSchedule
    from p2pcast.sparse.model_form import ModelForm
    from p2pcast.sparse.rollout_prediction import RolloutPrediction


class ScheduleFile(click.ParamType["BudgetSchedule"]):
    """A FILE in the format of ``sparse_attention.json``."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BudgetSchedule:
        from p2pcast.sparse.budget_schedule import BudgetSchedule

        if isinstance(value, BudgetSchedule):
            return value
        try:
            return BudgetSchedule.from_bytes(Path(value).read_bytes())
        except (UsageError, OSError) as error:
            self.fail(_with_path(Path(value), error), param, ctx)


class ModelFormType(click.ParamType["ModelForm"]):
    """A model's folder, or its figures."""

    name = "DIR|PARAMETERS:LAYERS:WIDTH:QUERIES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ModelForm:
        from p2pcast.sparse.model_form import ModelForm

        if isinstance(value, ModelForm):
            return value
        file = Path(value) / "config.json"
        try:
            if not Path(value).is_dir():
                return ModelForm.parse(value)
            return ModelForm.of_config(json.loads(file.read_bytes()))
        except (ValueError, RecursionError):
            self.fail(f"{file} is no JSON document", param, ctx)
        except OSError as error:
            self.fail(_with_path(file, error), param, ctx)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def _with_path(path: Path, error: UsageError | OSError) -> str:
    return f"{path}: {(error.strerror if isinstance(error, OSError) else None) or error}"


def predicts_sparse(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``--sparse`` and the options it needs; ``function`` gets a ``prediction``, or None without ``--sparse``."""

    @wraps(function)
    def command(
        *,
        schedule: BudgetSchedule | None,
        model: ModelForm | None,
        prompt_tokens: int | None,
        answer_tokens: tuple[int, ...],
        samples: int | None,
        intensity: float | None,
        **others: Any,
    ) -> None:
        prediction = _prediction(schedule, model, prompt_tokens, answer_tokens, samples, intensity)
        function(prediction=prediction, **others)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _prediction(
    schedule: BudgetSchedule | None,
    model: ModelForm | None,
    prompt_tokens: int | None,
    answer_tokens: tuple[int, ...],
    samples: int | None,
    intensity: float | None,
) -> RolloutPrediction | None:
    from p2pcast.sparse.rollout_prediction import predicted

    stated = [model, prompt_tokens, answer_tokens or None, samples, intensity]
    if schedule is None and stated == [None] * len(stated):
        return None
    if schedule is None or model is None or prompt_tokens is None or not answer_tokens or not samples or not intensity:
        raise click.UsageError(
            "--sparse, --model, --prompt-tokens, --answer-tokens, --samples and --intensity go together"
        )
    return predicted(model, schedule, answer_tokens, prompt=prompt_tokens, samples=samples, intensity=intensity)


_OPTIONS = (
    click.option(
        "--sparse",
        "schedule",
        type=ScheduleFile(),
        help="Schedule of sparse attention: rates of --price, measured with dense attention, are multiplied by the "
        "predicted speed-up.",
    ),
    click.option(
        "--model", type=ModelFormType(), help="For --sparse: folder with the model's config.json, or figures."
    ),
    click.option("--prompt-tokens", type=click.IntRange(0), help="For --sparse: tokens of a prompt."),
    click.option(
        "--answer-tokens",
        type=click.IntRange(1),
        multiple=True,
        help="For --sparse: tokens of an answer. Repeatable: equally many answers of each length.",
    ),
    click.option("--samples", type=click.IntRange(1), help="For --sparse: samples of one prompt."),
    click.option(
        "--intensity",
        type=click.FloatRange(min=0, min_open=True),
        help="For --sparse: operations a second of a worker's device ÷ cache values that it reads a second.",
    ),
)
