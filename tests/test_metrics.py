"""How torchmetrics objects are shared, and what is refused of them."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper, Running

from lightning_pp import PipelineStrategy
from lightning_pp.metrics.groups import groups_of_whole_batches
from lightning_pp.metrics.shared import SharedMetrics
from lightning_pp.runtime.groups import Replicas
from tests.launch import run_ranks, try_ranks
from tests.models import MLP
from tests.training import QUIET, assert_same, piped, plain


class Holder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.classes = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.hidden = {"sum": SumMetric()}


def shared(module: LightningModule) -> SharedMetrics:
    return SharedMetrics(module, None, 0, Replicas(), lambda: False, torch.device("cpu"))


def test_a_shared_metric_stays_what_it_is() -> None:
    module = Holder()
    module.error.update(torch.zeros(2), torch.ones(2))
    before = {key: value for key, value in vars(module.error).items() if key not in ("update", "compute")}
    metrics = shared(module)
    assert isinstance(module.error, MeanSquaredError)
    assert type(module.error) is not MeanSquaredError
    assert type(module.error).__name__ == "MeanSquaredError"
    assert not module.error.distributed_available_fn()
    thawed = pickle.loads(pickle.dumps(module))
    assert type(thawed.error) is MeanSquaredError
    assert type(thawed.classes.metric) is MulticlassAccuracy
    assert thawed.error.distributed_available_fn is before["distributed_available_fn"]
    assert thawed.error.compute() == 1
    metrics.release()
    assert type(module.error) is MeanSquaredError
    assert {key: vars(module.error)[key] for key in before} == before
    assert type(module.hidden["sum"]) is SumMetric


def test_copies_are_shared_as_long_as_they_live() -> None:
    module = Holder()
    metrics = shared(module)
    copied = copy.deepcopy(module)
    assert type(copied.classes) is type(module.classes) or type(copied.classes).__name__ == "ClasswiseWrapper"
    for metric in (copied.error, copied.classes, copied.classes.metric, module.error.clone()):
        assert type(metric).__mro__[1].__name__ == "_Shared"
    number = len(metrics._links)
    del copied, metric
    gc.collect()
    assert len(metrics._links) < number
    kept = module.error.clone()
    metrics.release()
    assert type(kept) is MeanSquaredError


def test_groups_are_found_by_whole_batches() -> None:
    """One sample far from all thresholds makes accuracies with different thresholds equal."""
    scores, labels = torch.tensor([0.95, 0.7]), torch.tensor([1, 1])

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.both = MetricCollection({"low": BinaryAccuracy(0.5), "high": BinaryAccuracy(0.9)})

    module = Module()
    with groups_of_whole_batches(module, 2):
        for row in (0, 1):
            module.both.update(scores[row : row + 1], labels[row : row + 1])
    assert len(module.both._groups) == 2
    assert module.both._groups_checked
    assert module.both.compute() == {"low": 1.0, "high": 0.5}
    module = Module()
    module.both.update(scores[:1], labels[:1])
    assert len(module.both._groups) == 1, "torchmetrics compares after the first call"


class Counts(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.last = Running(SumMetric(), 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last.update(batch[0].sum())
        return self.loss(batch)


class Resets(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last.reset()
        return self.loss(batch)


class Loose(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loose", SumMetric())
        return self.loss(batch)


class LogsACollection(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("several", MetricCollection([SumMetric()]))  # type: ignore[arg-type]
        return self.loss(batch)


class Reduces(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("median", batch[0].mean(), reduce_fx=torch.median)
        return self.loss(batch)


def refused(cls: type[MLP]) -> str:
    strategy = PipelineStrategy(stages=1, microbatches=3)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    try:
        trainer.fit(cls(), MLP.loader())
    except Exception as error:
        return f"{error} {error.__cause__}"
    return "not refused"


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Counts, "self.last is a Running, whose value depends on how often it is called"),
        (Resets, "self.last.reset() was called inside a step, which runs once for every micro-batch."),
        (Loose, "was given a SumMetric that is no attribute of Loose. Assign it to the module"),
        (LogsACollection, "self.log('several', ...) was given a MetricCollection."),
        (Reduces, "allowed are 'mean', 'sum', 'max' and 'min'. For another reduction log a torchmetrics Metric."),
    ],
)
def test_what_has_no_meaning_in_micro_batches(cls: type[MLP], text: str) -> None:
    (found,) = run_ranks(refused, 1, cls)
    assert text in found


class Persistent(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.error.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.error.update(out, batch[1])
        return F.mse_loss(out, batch[1])


def save(stages: int, path: Path) -> None:
    torch.manual_seed(1)
    strategy: Any = {"strategy": PipelineStrategy(stages=stages, microbatches=3)} if stages else {}
    trainer = Trainer(accelerator="cpu", devices=max(stages, 1), max_epochs=1, precision="64-true", **QUIET, **strategy)
    trainer.fit(Persistent(), MLP.loader())
    trainer.save_checkpoint(path)


def test_states_that_belong_into_checkpoints(tmp_path: Path) -> None:
    run_ranks(save, 1, 0, tmp_path / "plain.ckpt")
    run_ranks(save, 2, 2, tmp_path / "piped.ckpt")
    files = [torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("piped", "plain")]
    ours, theirs = (file["state_dict"] for file in files)
    assert list(ours) == list(theirs)
    assert theirs["error.sum_squared_error"] > 0
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


class Alone(MLP):
    """Asks for one metric on rank 0, and for another one elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = SumMetric(), SumMetric()

    def on_train_epoch_end(self) -> None:
        metric: Metric = self.one if self.trainer.is_global_zero else self.other
        metric.compute()


def ask_alone() -> None:
    strategy = PipelineStrategy(stages=2, microbatches=3)
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET).fit(Alone(), MLP.loader())


def test_ranks_that_ask_for_different_metrics() -> None:
    first = str(try_ranks(ask_alone, 2, timeout=40)[0])
    assert "This rank asked for the value of the metric self.one, and the last stage gave that of self.other." in first


class AsksInBetween(MLP):
    """Logs one metric as an object, and computes another one by hand when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.sum = MeanSquaredError().set_dtype(torch.float64), SumMetric().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.error.update(out, batch[1])
        self.sum.update(len(out))
        self.log("error", self.error, on_step=False, on_epoch=True, prog_bar=True)
        return F.mse_loss(out, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("sum", self.sum.compute())


def show(stages: int) -> dict[str, float]:
    torch.manual_seed(1)
    options: dict[str, Any] = {**QUIET, "enable_progress_bar": True, "callbacks": [TQDMProgressBar()]}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=3)
    trainer = Trainer(accelerator="cpu", devices=max(stages, 1), max_epochs=2, precision="64-true", **options)
    trainer.fit(AsksInBetween(), MLP.loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_progress_bar_asks_on_rank_0_alone() -> None:
    """It asks for the logged metric before the module's hook asks for another one, and only where there is a bar."""
    (expected,) = run_ranks(show, 1, 0)
    assert expected["sum"] == 42
    for found in run_ranks(show, 2, 2):
        assert found == pytest.approx(expected, abs=1e-9)


class Learned(Metric):
    """Computes with weights of its own, as scores with a network do."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).requires_grad_(False)
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, values: Tensor) -> None:
        self.total += self.net(values).sum()

    def compute(self) -> Tensor:
        return self.total


class LogsBeforeItCalls(MLP):
    """Lightning shows the value of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.score = Learned()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.log("score", self.score, on_epoch=True)
        self.log("batch_score", self.score(out.detach()), on_epoch=True)
        return F.mse_loss(out, batch[1])


def test_a_metric_with_weights_of_its_own() -> None:
    reference, found = plain("MLP", cls=LogsBeforeItCalls), piped("MLP", 2, 3, cls=LogsBeforeItCalls)
    assert {"score_step", "score_epoch", "batch_score_step"} <= reference.final.keys()
    assert reference.final["score_step"] != reference.final["batch_score_step"]
    assert_same(reference, found)
