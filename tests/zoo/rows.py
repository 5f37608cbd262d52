"""All entries of the zoo, by name."""

from tests.zoo import adapters, decoders, encoders, translators
from tests.zoo.entries import Entry

ROWS: dict[str, Entry] = {**decoders.ENTRIES, **encoders.ENTRIES, **translators.ENTRIES, **adapters.ENTRIES}
