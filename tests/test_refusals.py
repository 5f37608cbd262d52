"""What cannot work is refused before the first step, with what was given, what is allowed and what to do."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelPruning

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks, try_ranks
from tests.models import LSTM, MLP, Boring
from tests.training import QUIET, fit

CONSTRUCTOR = [
    ({"stages": 0}, ValueError, "stages=0: allowed is 'auto' or an int of at least 1."),
    ({"stages": "two"}, TypeError, "stages='two': allowed is 'auto' or an int of at least 1."),
    ({"stages": True}, TypeError, "stages=True"),
    ({"microbatches": 0}, ValueError, "microbatches=0: allowed is None or an int of at least 1."),
    ({"microbatches": 2.5}, TypeError, "microbatches=2.5"),
    ({"schedule": "2f2b"}, ValueError, "schedule='2f2b': allowed are 'gpipe', '1f1b', 'eager_1f1b', 'auto_1f1b'"),
    ({"schedule": "1f1b+x"}, ValueError, "schedule='1f1b+x': allowed are"),
    ({"schedule": "missing.csv"}, ValueError, "missing.csv"),
    ({"balance": "luck"}, ValueError, "balance='luck': allowed are 'flops', 'params', 'time', 'memory'."),
    ({"interleave": 2}, ValueError, "interleave=2"),
    ({"save_distributed_checkpoint": "yes"}, TypeError, "save_distributed_checkpoint='yes'"),
    ({"process_group_backend": "mpi"}, ValueError, "process_group_backend='mpi': allowed are None, 'gloo' and 'nccl'."),
    ({"timeout": timedelta(0)}, ValueError, "timeout=0:00:00"),
    ({"split": "net.2"}, TypeError, "write ['name'], not 'name'"),
    ({"stages": 3, "split": ["net.2"]}, ValueError, "names 1 layer(s), but stages=3 needs 2"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), CONSTRUCTOR)
def test_arguments_that_no_model_could_use(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        PipelineStrategy(**arguments)


SET_UP = {
    "stages do not divide the processes": (
        "MLP", 3, {"stages": 2}, {}, r"PipelineStrategy\(stages=2\) needs a multiple of 2 processes, but .* = 3"),
    "more stages than layers": (
        "Boring", 2, {"stages": 2}, {}, r"Boring.training_step calls only 1 layer\(s\): layer. Use at most 1"),
    "an unknown layer in split": ("MLP", 2, {"split": ["net.9"]}, {}, r"no layer 'net.9'. The layers are 'net.0'"),
    "a split out of order": (
        "MLP", 3, {"split": ["net.4", "net.2"]}, {}, r"'net.2' does not come after the layer that begins stage 1"),
    "an unknown class in layers": ("MLP", 2, {"layers": ["torch.nn.Conv9d"]}, {}, r"'torch.nn.Conv9d' matches no"),
    "a reentrant checkpoint over a cut": ("SpanningReentrant", 2, {}, {}, r"divides what runs in torch.utils"),
    "a value carried from step to step": ("LSTM", 2, {}, {}, r"self.hidden carries a value"),
    "Lightning's own LSTM demo": ("DemoLSTM", 2, {}, {}, r"self.hidden carries a value that layers computed"),
    "sparse gradients in replicas": (
        "SparseGPT", 2, {"stages": 1}, {}, r"SparseGPT.tok makes sparse gradients, which .* over 2 replicas"),
    "an unsupported callback": (
        "MLP", 2, {}, {"callbacks": [ModelPruning("l1_unstructured")]}, r"not support the callback ModelPruning: it"),
}  # fmt: skip


@pytest.mark.parametrize("case", SET_UP)
def test_a_model_or_trainer_that_cannot_be_piped(case: str) -> None:
    name, processes, strategy, trainer, text = SET_UP[case]
    failures = try_ranks(refused_fit, processes, name, strategy, trainer, processes, timeout=40)
    for failure in failures:
        assert re.search(text, str(failure)), failure
        assert "MisconfigurationException" in str(failure)


def refused_fit(name: str, strategy: Any, trainer: Any, devices: int) -> str:
    extra = trainer.get("callbacks", [])
    try:
        if extra:
            runner = Trainer(
                accelerator="cpu", devices=devices, strategy=PipelineStrategy(**strategy), callbacks=extra, **QUIET
            )
            runner.fit(MLP(), MLP.loader())
        fit(name, strategy, trainer={}, devices=devices)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Manual(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(MLP):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class TwoOptimizers(MLP):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:3].parameters(), 0.1), torch.optim.SGD(self.net[3:].parameters(), 0.1)]


class ReturnsNone(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class ReadsEarly(MLP):
    def loss(self, batch: Any) -> Any:
        hidden = self.net[:3](batch[0])
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.net[3:](hidden).sum()


class TakesIterator(MLP):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class LBFGS(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Manual, "does not support manual optimization, and Manual sets"),
        (OwnBackward, "OwnBackward overrides `backward`"),
        (TwoOptimizers, "multiple optimizers is only supported with manual optimization"),  # says Lightning itself
        (ReturnsNone, "must return the loss"),
        (TakesIterator, "takes `dataloader_iter`"),
    ],
)
def test_a_module_that_cannot_be_piped_even_in_one_stage(cls: type[LightningModule], text: str) -> None:
    assert text in str(try_ranks(fit_class, 1, cls, timeout=40)[0])


@pytest.mark.parametrize(
    ("cls", "text"), [(ReadsEarly, "reads a value that comes from layer 'net.2'"), (LBFGS, "does not support LBFGS")]
)
def test_a_module_that_cannot_be_piped_in_two_stages(cls: type[LightningModule], text: str) -> None:
    for failure in try_ranks(fit_class, 2, cls, timeout=40):
        assert text in str(failure)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["0F0,2F0,2B0,0B0", "1F0,3F0,3B0,1B0"], "has 4 stages on 2 ranks"),
        (["0F0,0I0,0W0", "1F0,1I0,1W0"], "splits the backward of stage 0"),
        (["0F0,0B0", "1B0,1F0"], "1B0"),
        (["0F0,0B0", "1F0,1B0", "2F0,2B0"], "3"),
        (["0F0,0B0", "1F0,1B0"], "has 1 micro-batches, 2 were asked for"),
    ],
)
def test_schedule_files_that_cannot_be_run(tmp_path: Any, rows: list[str], text: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(rows) + "\n")
    microbatches = 2 if "2 were asked" in text else 1
    strategy = {"schedule": str(path), "microbatches": microbatches}
    for failure in try_ranks(refused_fit, 2, "MLP", strategy, {}, 2, timeout=40):
        assert re.search(text, str(failure)), failure
        assert "MisconfigurationException" in str(failure) or "ValueError" in str(failure)


class DiffersByRank(MLP):
    def loss(self, batch: Any) -> Any:
        import os

        x, y = batch
        for index, layer in enumerate(self.net):
            if index != 3 or os.environ["LOCAL_RANK"] != "1":
                x = layer(x)
        return torch.nn.functional.mse_loss(x, y)


def test_processes_that_run_different_models() -> None:
    """Every rank says so at once: one that raised alone would leave the others waiting for it."""
    for text in run_ranks(fit_class, 3, DiffersByRank):
        assert "Rank 1 calls other layers than rank 0: ['net.0', 'net.1', 'net.2', 'net.4'" in text


def fit_class(cls: type[LightningModule]) -> str:
    import os

    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="pipeline", max_epochs=1, **QUIET
    )
    try:
        trainer.fit(cls(), MLP.loader())
    except Exception as error:
        text, cause = f"{error}", error.__cause__
        return f"{text} {cause}"
    return "not refused"


def test_one_stage_takes_what_needs_no_cut() -> None:
    """The demo that carries its hidden state, and the one that has one layer."""
    assert issubclass(LSTM, LightningModule)
    assert issubclass(Boring, LightningModule)
    assert not isinstance(try_ranks(fit, 1, "Boring", {"stages": 1, "microbatches": 2}, timeout=40)[0], str)


def test_batch_norm_is_warned_about_once() -> None:
    (texts,) = run_ranks(warnings_of_batch_norm, 1)
    assert len(texts) == 1, texts
    assert "'body.3' is a BatchNorm1d" in texts[0]


class BatchNormed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = torch.nn.BatchNorm1d(8)


@pytest.mark.parametrize(("microbatches", "samples"), [(8, 8), (3, 5)])
def test_micro_batches_of_one_sample_may_be_too_small(microbatches: int, samples: int) -> None:
    """Those of the first batch, and those of a last one that is smaller than the others."""
    for failure in try_ranks(fit_batch_normed, 2, microbatches):
        assert "Expected more than 1 value per channel when training" in failure.text
        assert f"The micro-batch holds one of the batch's {samples} samples." in failure.text
        assert "use fewer microbatches or a larger batch_size" in failure.text


def fit_batch_normed(microbatches: int) -> None:
    fit("MLP", {"stages": 2, "microbatches": microbatches}, devices=2, cls=BatchNormed)


def warnings_of_batch_norm() -> list[str]:
    import warnings

    from tests.models import GlueBuffers

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = PipelineStrategy(microbatches=2)
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, precision="64-true", max_epochs=1, **QUIET)
        trainer.fit(GlueBuffers(), GlueBuffers.loader())
    return [str(one.message) for one in caught if "BatchNorm" in str(one.message)]


def averages_twice() -> str:
    """Fits a module with averaged weights a second time; each process holds its own stage by then."""
    module = MLP()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **QUIET}
    averaging = callbacks.WeightAveraging
    for _ in range(2):
        strategy = PipelineStrategy(stages=2, microbatches=2)
        Trainer(strategy=strategy, callbacks=[averaging()], **options).fit(module, module.loader())
    return "not refused"


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="this version of Lightning has no such callback")
def test_averages_of_a_model_that_is_in_stages_already() -> None:
    """Copying a module whose parameters lie elsewhere ended in a NotImplementedError of torch."""
    for failure in try_ranks(averages_twice, 2):
        assert "WeightAveraging copies the whole model" in str(failure)
        assert "MisconfigurationException" in str(failure)
