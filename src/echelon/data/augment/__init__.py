"""Changes made to whole batches of training samples, drawn from (seed, epoch, position).

Every one is a pure function of (batch, draws) that changes the column `x` and, but for
`Normalise`, keeps its dtype.
"""

from echelon.data.augment.compose import Compose, from_section
from echelon.data.augment.images import Crop, Cutout, Flip
from echelon.data.augment.mixup import Mixup
from echelon.data.augment.normalise import Normalise

__all__ = ["Compose", "Crop", "Cutout", "Flip", "Mixup", "Normalise", "from_section"]
