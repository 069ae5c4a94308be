"""Small models and a Trainer for the tests; as a script, a training in two processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.torchvision_operators  # noqa: F401  # before transformers, which imports torchvision

# isort: split

import torch
import transformers

from slimstart import EqualWorth, Flops
from slimstart.integrations.transformers import SlimmingCallback

SEARCHING = EqualWorth(align=1, search_steps=24, rounds=12, rate=1.0, pull=0.0)  # changes up to step 24
STEPS = 30
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=3, **WIDTH, **NO_DROPOUT)
    return transformers.BertForSequenceClassification(config)


def vit() -> Any:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **WIDTH)
    return transformers.ViTForImageClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "vit": vit, "gpt2": gpt2}


def dataset(kind: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (STEPS * 8, 12), generator=generator)
    images = torch.randn(len(ids), 3, 16, 16, generator=generator)
    if kind == "gpt2":
        return [{"input_ids": row, "labels": row} for row in ids]
    labels = (ids[:, 0] % 3).tolist()
    name, inputs = ("pixel_values", images) if kind == "vit" else ("input_ids", ids)
    return [{name: one, "labels": label} for one, label in zip(inputs, labels, strict=True)]


class Ordered(transformers.Trainer):  # type: ignore[misc]
    """A trainer without shuffling."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(
    model: Any,
    folder: Path,
    kind: str = "bert",
    slimming: Any = None,
    cls: Any = transformers.Trainer,
    optimizers: Any = (None, None),
    **options: Any,
) -> Any:
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 100}
    own = {**quiet, "per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-3}
    own |= {"average_tokens_across_devices": False, **options}  # otherwise losses are multiplied by the processes
    callback = slimming or SlimmingCallback(Flops(0.7), SEARCHING)
    data = dataset(kind)
    return cls(
        model,
        transformers.TrainingArguments(str(folder), **own),
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=[callback],
        optimizers=optimizers,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    model = bert().double()
    run = trainer(model, Path(sys.argv[1]), cls=Ordered, per_device_train_batch_size=4)
    run.train()
    torch.save(model.state_dict(), Path(sys.argv[1]) / f"rank{run.args.process_index}.pt")
    torch.distributed.destroy_process_group()  # otherwise threads of gloo may abort the process at its exit
