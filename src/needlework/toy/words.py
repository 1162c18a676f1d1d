"""Vocabulary of the toy language by word class. Every word is one token; no text is taken from elsewhere."""

from __future__ import annotations

from itertools import chain, product

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MARKS = (".", "?", ":", ",")
DIGITS = tuple("0123456789")
LETTERS = ("A", "B", "C", "D")


def _joined(heads: str, tails: str) -> tuple[str, ...]:
    """Return every head + tail. Tails vary slowest, so that neighbours in the list look different."""
    return tuple(head + tail for tail, head in product(tails.split(), heads.split()))


# Names in needles, phone books and key-value lists. Facts never use them.
NAMES = _joined("bel cor dra fen gal hul jor kel lor mar nol pel ros sel tor vel", "an ek is om ine")

# Keys and values of the facts.
COUNTRIES = _joined("arb bren cald dun esk fal gor hesk ilm", "ovia aria istan land")
CITIES = _joined("ash bram cope dell eld fern glen hart ives", "ton ville port burg")
FOUNDERS = _joined("ader beck crom dorn elm frost grim holt ibs", "well son er by")
ANIMALS = _split(
    "badger beaver bison camel crab crane eagle ferret gecko heron ibex jackal koala lemur lynx mole newt otter panda "
    "quail raven seal tapir viper"
)
HABITATS = _split("desert swamp jungle tundra prairie reef canyon lagoon")
TRADES = _split(
    "actor barber brewer carver cooper dyer fletcher furrier gilder glazier joiner mason potter printer roofer saddler "
    "scribe smith tailor tanner thatcher turner weaver wright"
)
TOOLS = _split(
    "adze anvil awl bellows brush chisel compass crucible drill file gouge kiln ladle lathe loom mallet needle plane "
    "pliers press quill rasp saw spindle"
)
DISHES = _split(
    "barley cabbage dumplings eels figs ginger honey jelly kale lentils mutton noodles olives pancakes quinces radish "
    "salmon turnips"
)
STONES = _split(
    "agate amber beryl coral flint garnet jade jasper jet marble mica onyx opal pearl pumice pyrite quartz ruby slate "
    "spinel sulphur talc topaz zircon"
)
COLOURS = _split("red blue green yellow black white brown grey pink purple orange golden")

# Values of needles, besides digits and colours.
HIDEOUTS = _split("attic barrel basket cellar chest chimney cupboard drawer hedge jar loft oven pocket shed trunk well")
GIFTS = _split("bell book bowl candle coat cup drum fan flute hat kite knife mirror pipe scarf violin")

# Parts of haystack sentences.
PEOPLE = _split(
    "king queen sailor farmer child merchant teacher stranger doctor miller soldier hunter widow painter priest shepherd"
)
MANNERS = _split("old young tall quiet happy tired clever poor")
# Pairs of synonyms: paraphrases replace a verb by the other one of its pair.
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
THINGS = _split(
    "apple ring loaf map boat horse stone lamp chair rope bottle clock ladder wheel box letter blanket cart spade goose"
)
LOOKS = _split("small large heavy broken wooden silver clean dusty round narrow")
PLACES = _split("river market harbor hill church bridge garden road forest tower mill field")
SIDES = _split("near behind under beside in at")
_PHRASES = "at night|every day|last winter|before dawn|after supper|on sunday|this spring|once more|at noon|in autumn"
TIMES = tuple(_split(phrase) for phrase in _PHRASES.split("|"))
DETERMINERS = ("the", "a", "my")
FUNCTION = _split(
    "the a my of is in for to with what which where who does has and so same again this one right word secret code "
    "badge key hid hides gift gets capital lives live works work use people eat colour founder founded city context "
    "question answer quote phone book number pairs ask copy judge first second yes no"
)


_GROUPS = (
    *(MARKS, DIGITS, LETTERS, FUNCTION, DETERMINERS, NAMES, COUNTRIES, CITIES, FOUNDERS, ANIMALS, HABITATS),
    *(TRADES, TOOLS, DISHES, STONES, COLOURS, HIDEOUTS, GIFTS, PEOPLE, MANNERS, VERBS, THINGS, LOOKS, PLACES),
    *(SIDES, *TIMES),
)
VOCABULARY: tuple[str, ...] = (*SPECIAL, *dict.fromkeys(chain.from_iterable(_GROUPS)))
WORD_ID: dict[str, int] = {word: index for index, word in enumerate(VOCABULARY)}
