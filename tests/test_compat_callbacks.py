"""Private names of Lightning's callbacks, of its results, and of torchmetrics: each test says which one has moved."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging, ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torchmetrics import Metric, MetricCollection, SumMetric

from lightning_pp import compat
from lightning_pp.metrics.links import _PASSING, _REPLACED


def test_logged_metric_objects() -> None:
    class WithResults(Trainer):
        _results = _ResultCollection(training=True)  # type: ignore[assignment]

    trainer = WithResults(logger=False, enable_checkpointing=False, accelerator="cpu")
    one, other = SumMetric(), SumMetric()
    for name, metric, on_epoch in (("one", one, True), ("other", other, False)):
        trainer._results.log("training_step", name, metric, on_step=True, on_epoch=on_epoch)
    trainer._results.log("training_step", "tensor", torch.tensor(1.0))
    assert [metric is one for metric in compat.logged_metrics(trainer)] == [True]


def test_what_callbacks_keep() -> None:
    assert compat.averaged_model(ModelSummary()) is None
    averaging = StochasticWeightAveraging(0.1)
    module = BoringModel()
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    averaging.setup(trainer, module, "fit")
    assert isinstance(compat.averaged_model(averaging), LightningModule)
    monitor = ThroughputMonitor(len)
    assert compat.throughputs(monitor) == []
    summary = ModelSummary(3)
    assert compat.summary_depth(summary) == 3
    assert callable(ModelSummary._summary)
    assert not compat.skips_backward(trainer)
    trainer.fit_loop._skip_backward = True
    assert compat.skips_backward(trainer)


def test_the_order_of_several_loaders() -> None:
    assert compat.is_sequential(CombinedLoader([[1], [2]], "sequential"))
    assert not compat.is_sequential(CombinedLoader([[1], [2]], "max_size_cycle"))


def test_attributes_of_metrics() -> None:
    metric: Metric = SumMetric()
    assert set(_REPLACED) | set(_PASSING) | {"_defaults", "_persistent"} <= vars(metric).keys()
    assert "update" not in metric.__getstate__()
    assert "compute" not in metric.__getstate__()
    collection = MetricCollection([SumMetric()])
    assert {"_enable_compute_groups", "_groups_checked", "_state_is_copy", "_groups"} <= vars(collection).keys()
    assert callable(collection._merge_compute_groups)
    assert callable(collection._compute_groups_create_state_ref)
