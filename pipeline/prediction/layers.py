"""How the layers of a deep model follow from those of a shallow one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layers:
    """The layers of the shallow model, and how many more the deep model has."""

    num_layers: int
    period: int
    """Number of layers after which they repeat: 2 where every second one is checkpointed."""
    num_more: int
    """A multiple of the period."""
    reach: int = 1
    """The most layers between those of an event and of the one after it, but from the first layers to the last ones.

    So many first layers are not repeated: they differ from the others in what came before them.
    """

    @property
    def num_before_last(self) -> int:
        """The index of the first layer after the repeated ones, in the shallow model."""
        return self.reach + self.period

    def source(self, layer: int) -> int:
        """Return the shallow model's layer of which a layer of the deep model is a copy."""
        if layer < self.reach:
            return layer
        if layer >= self.num_before_last + self.num_more:
            return layer - self.num_more
        return self.reach + (layer - self.reach) % self.period

    def copies(self, layer: int) -> int:
        """Return the number of layers in the deep model that are copies of a layer of the shallow one."""
        return 1 + self.num_more // self.period * (self.reach <= layer < self.num_before_last)

    def next(self, layer: int | None, copy: int | None, following: int | None) -> int | None:
        """Return the layer in the deep model of the event after an event of `layer`, which is there in layer `copy`.

        `following` is its layer in the shallow model. From the first layers to the last ones it is counted from the
        last one, else from where it is.

        Raises:
            LookupError: it follows an event of no layer, and is one that is repeated.

        """
        if following is None:
            return None
        if layer is None or copy is None:
            if self.reach <= following < self.num_before_last:
                raise LookupError
        elif (
            (layer < self.reach) == (following < self.reach)
            or max(layer, following) < self.num_before_last
            or abs(following - layer) <= self.reach
        ):
            return copy + following - layer
        return following + self.num_more * (following >= self.reach)


def fewest_layers(num_layers: int, period: int, reach: int = 1) -> int:
    """Return the layers of the shallow model: at least one period between the first and the last ones.

    The last layers differ in what comes after them, and the one before follows such a layer.
    """
    least = reach + max(period, reach + 1) + 1
    return least + (num_layers - least) % period
