"""A Lightning script with validation."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH = 3, 320, 32


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


data = TensorDataset(torch.rand(SAMPLES, 4), torch.rand(SAMPLES, 1))
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(data, BATCH), DataLoader(data, BATCH))
