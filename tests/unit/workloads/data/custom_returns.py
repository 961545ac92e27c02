"""A user's file with many workloads, valid ones first. None of them imports stepscope."""

from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

CALLED_WITH = {}


class Numbers(Dataset):
    """Pairs (x, y) that a linear model can learn."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        x = torch.tensor([index * factor % 16 / 16 for factor in (1, 3, 5, 7)])
        return x, x.sum().view(1)


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self):
        return iter(Numbers())


class SizedStream(Stream):
    def __len__(self):
        return 64


class Labelled(nn.Module):
    """Computes its own loss, like the models of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        loss = None if labels is None else nn.functional.mse_loss(out, labels)
        return SimpleNamespace(loss=loss, logits=out)


class Dicts(Numbers):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


def net():
    return nn.Linear(4, 1)


def step(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def workload():
    return {"model": net(), "loss": nn.MSELoss(), "data": Numbers()}


def with_step():
    return {"model": net(), "step": step, "data": Numbers()}


def with_step_of_dict():
    return {"model": net(), "step": lambda m, b: {"loss": step(m, b)}, "data": Numbers()}


def as_tuple():
    return net(), nn.MSELoss(), Numbers()


def as_pair():
    return Labelled(), Dicts()


def as_record():
    return SimpleNamespace(model=net(), loss=nn.MSELoss(), data=Numbers())


def as_named_tuple():
    return namedtuple("Training", "model data step")(net(), Numbers(), step)


def with_labels():
    return {"model": Labelled(), "data": Dicts()}


def with_tensors():
    x = torch.rand(64, 4)
    return {"model": net(), "loss": nn.MSELoss(), "data": TensorDataset(x, x[:, :1])}


def with_list():
    return {"model": net(), "step": step, "data": list(Numbers())}


def with_collate():
    def halves(samples):
        x = torch.stack([x for x, _ in samples])
        return x, x.sum(1, keepdim=True) / 2

    return {"model": net(), "step": step, "data": Numbers(), "collate": halves}


def with_loader():
    return {"model": net(), "step": step, "data": DataLoader(Numbers(), 7, collate_fn=twice)}


def twice(samples):
    return torch.stack([x for x, _ in samples]), 2 * torch.stack([y for _, y in samples])


def with_plain_loader():
    return {"model": net(), "step": step, "data": DataLoader(Numbers(), 32)}


def with_like_loader():
    return workload() | {"data": DataLoader(Numbers(), 16, shuffle=True, drop_last=True)}


def with_sampler():
    sampler = WeightedRandomSampler([1.0] * 64, 64)
    return workload() | {"data": DataLoader(Numbers(), 16, sampler=sampler)}


def with_batch_sampler():
    batches = [list(range(16)), list(range(16, 32))]
    return workload() | {"data": DataLoader(Numbers(), batch_sampler=batches)}


def with_stream():
    return {"model": net(), "step": step, "data": Stream()}


def with_sized_stream():
    return {"model": net(), "step": step, "data": SizedStream()}


def with_optimizer():
    return workload() | {"optimizer": lambda p: torch.optim.Adam(p, lr=0.05)}


def with_made_optimizer():
    parts = workload()
    return parts | {"optimizer": torch.optim.Adam(parts["model"].parameters(), lr=0.05)}


def taking_some(batch_size, image_size=48, *, fraction, unknown=None):
    CALLED_WITH.clear()
    CALLED_WITH.update(batch_size=batch_size, image_size=image_size, fraction=fraction)
    return workload()


def taking_all(samples=40, **settings):
    CALLED_WITH.clear()
    CALLED_WITH.update(settings, samples=samples)
    return workload()


def wanting_a_size(image_size):
    return workload()


def wanting_a_stranger(bach_size):
    return workload()


def returning_nothing():
    pass


def returning_a_model():
    return net()


def returning_four():
    return net(), nn.MSELoss(), Numbers(), 4


def without_model():
    return {"loss": nn.MSELoss(), "data": Numbers()}


def without_data():
    return {"model": net(), "loss": nn.MSELoss(), "data": None}


def with_a_typo():
    return {"model": net(), "los": nn.MSELoss(), "data": Numbers()}


def with_a_class():
    return {"model": Labelled, "data": Dicts()}


def with_loss_and_step():
    return workload() | {"step": step}


def with_a_loss_class():
    return workload() | {"loss": nn.MSELoss}


def with_a_short_step():
    return {"model": net(), "step": lambda batch: batch, "data": Numbers()}


def with_a_dict_of_data():
    return workload() | {"data": {"train": Numbers(), "test": Numbers()}}


def with_a_generator():
    return workload() | {"data": (x for x in Numbers())}


def with_no_sample():
    return workload() | {"data": Numbers(0)}


def with_whole_batches():
    return workload() | {"data": DataLoader(Numbers(), batch_size=None)}


def with_a_number_as_optimizer():
    return workload() | {"optimizer": 0.1}


def with_a_number_as_collate():
    return workload() | {"collate": 3}


def with_a_float_loss():
    return workload() | {"loss": lambda out, y: 1.5}


def with_many_losses():
    return workload() | {"loss": nn.MSELoss(reduction="none")}


def with_loss_for_dicts():
    return {"model": net(), "loss": nn.MSELoss(), "data": Dicts()}


def with_pairs_and_no_loss():
    return {"model": net(), "data": Numbers()}


def with_no_labels():
    return {"model": Labelled(), "data": [{"x": torch.rand(4)}] * 64}


def with_a_wrong_optimizer():
    return workload() | {"optimizer": lambda parameters: "adam"}


def raising():
    return deep(0)


def deep(number):
    return 1 / number  # it breaks here


def training():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Numbers(), 8):
        step(model, batch).backward()
        try:
            optimizer.step()  # it trains here
        except Exception:
            pass


def exiting():
    raise SystemExit(3)  # it ends here


not_a_function = 3
