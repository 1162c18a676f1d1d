"""The words of the toy language. Every word is one token; nothing here comes from an outside text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
MARKS = (".", "?", ":", ",")
DIGITS = tuple("0123456789")
LETTERS = ("A", "B", "C", "D")


def _joined(heads: str, tails: str) -> tuple[str, ...]:
    """Every head with every tail, tails running slowest so that neighbours in the list look different."""
    return tuple(head + tail for tail, head in product(tails.split(), heads.split()))


# Who needles, phone books and lists are about. Facts never use these names.
NAMES = _joined("bel cor dra fen gal hul jor kel lor mar nol pel ros sel tor vel", "an ek is om ine")

# What the fixed facts are about.
COUNTRIES = _joined("arb bren cald dun esk fal gor hesk ilm", "ovia aria istan land")
CITIES = _joined("ash bram cope dell eld fern glen hart ives", "ton ville port burg")
FOUNDERS = _joined("ader beck crom dorn elm frost grim holt ibs", "well son er by")
ANIMALS = tuple(
    "badger beaver bison camel crab crane eagle ferret gecko heron ibex jackal koala lemur lynx mole newt otter panda "
    "quail raven seal tapir viper".split()
)
HABITATS = tuple("desert swamp jungle tundra prairie reef canyon lagoon".split())
TRADES = tuple(
    "actor barber brewer carver cooper dyer fletcher furrier gilder glazier joiner mason potter printer roofer saddler "
    "scribe smith tailor tanner thatcher turner weaver wright".split()
)
TOOLS = tuple(
    "adze anvil awl bellows brush chisel compass crucible drill file gouge kiln ladle lathe loom mallet needle plane "
    "pliers press quill rasp saw spindle".split()
)
DISHES = tuple(
    "barley cabbage dumplings eels figs ginger honey jelly kale lentils mutton noodles olives pancakes quinces radish "
    "salmon turnips".split()
)
STONES = tuple(
    "agate amber beryl coral flint garnet jade jasper jet marble mica onyx opal pearl pumice pyrite quartz ruby slate "
    "spinel sulphur talc topaz zircon".split()
)
COLOURS = tuple("red blue green yellow black white brown grey pink purple orange golden".split())

# What needles hold besides digits and colours.
HIDEOUTS = tuple(
    "attic barrel basket cellar chest chimney cupboard drawer hedge jar loft oven pocket shed trunk well".split()
)
GIFTS = tuple("bell book bowl candle coat cup drum fan flute hat kite knife mirror pipe scarf violin".split())

# Haystack sentences.
PEOPLE = tuple(
    "king queen sailor farmer child merchant teacher stranger doctor miller soldier hunter widow painter priest "
    "shepherd".split()
)
MANNERS = tuple("old young tall quiet happy tired clever poor".split())
# Verbs come in pairs that mean the same: paraphrases swap one for the other.
SAME_VERBS = (
    ("sees", "notices"),
    ("finds", "discovers"),
    ("buys", "purchases"),
    ("carries", "hauls"),
    ("loses", "misplaces"),
    ("keeps", "retains"),
    ("watches", "observes"),
    ("brings", "fetches"),
    ("wants", "desires"),
    ("mends", "repairs"),
)
VERBS = tuple(verb for pair in SAME_VERBS for verb in pair)
THINGS = tuple(
    "apple ring loaf map boat horse stone lamp chair rope bottle clock ladder wheel box letter blanket cart spade "
    "goose".split()
)
LOOKS = tuple("small large heavy broken wooden silver clean dusty round narrow".split())
PLACES = tuple("river market harbor hill church bridge garden road forest tower mill field".split())
SIDES = tuple("near behind under beside in at".split())
TIMES = tuple(
    tuple(phrase.split())
    for phrase in (
        "at night|every day|last winter|before dawn|after supper|on sunday|this spring|once more|at noon|in autumn"
    ).split("|")
)
DETERMINERS = ("the", "a", "my")
FUNCTION = tuple(
    "the a my of is in for to with what which where who does has and so same again this one right word "
    "secret code badge key hid hides gift gets capital lives live works work use people eat colour founder founded city "
    "context question answer quote phone book number pairs ask copy judge first second yes no".split()
)


def _all_words() -> Iterator[str]:
    groups = (
        *(MARKS, DIGITS, LETTERS, FUNCTION, DETERMINERS, NAMES, COUNTRIES, CITIES, FOUNDERS, ANIMALS, HABITATS),
        *(TRADES, TOOLS, DISHES, STONES, COLOURS, HIDEOUTS, GIFTS, PEOPLE, MANNERS, VERBS, THINGS, LOOKS, PLACES),
        *(SIDES, *TIMES),
    )
    for group in groups:
        yield from group


VOCABULARY: tuple[str, ...] = (*SPECIAL, *dict.fromkeys(_all_words()))
WORD_ID: dict[str, int] = {word: index for index, word in enumerate(VOCABULARY)}
