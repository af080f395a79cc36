"""A language model whose learning rate warms up, as a user's own module might have it."""

from torch.optim.lr_scheduler import LambdaLR

from lit_dps.module import LanguageModel


class WarmLanguageModel(LanguageModel):
    """The rate rises in proportion to the steps, over the first `warm_up` of them."""

    def __init__(self, *args, warm_up: int = 20, **kwargs):
        super().__init__(*args, **kwargs)
        self.warm_up = warm_up

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
