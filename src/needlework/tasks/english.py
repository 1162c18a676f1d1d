"""Generator of English sentences from a small grammar. No text is taken from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from needlework.toy.sample import Stream


def _split(text: str, mark: str = "|") -> tuple[str, ...]:
    return tuple(text.split(mark))


PEOPLE = _split(
    "the baker|a neighbour|the old teacher|my cousin|the driver|a young nurse|the gardener|our landlord|the librarian|"
    "a tired clerk|the ferry captain|her brother|the night guard|a travelling salesman|the twins|an engineer|the judge|"
    "a quiet student|the carpenter|their aunt|the postman|a retired pilot|the innkeeper|the choir"
)
ACTS = _split(
    "repaired the fence|waited for the train|wrote a long letter|counted the boxes|painted the kitchen wall|"
    "looked for a lost glove|cleaned the windows|read the newspaper|planted a row of beans|forgot an umbrella|"
    "carried the bags upstairs|asked for directions|boiled some water|closed the shop|measured the table|"
    "told a story about the sea|swept the yard|bought a kettle|listened to the radio|sorted the mail|"
    "mended an old coat|walked along the canal|drew a map of the village|missed the first lecture"
)
TIMES = _split(
    "in the morning|after lunch|late in the evening|on Tuesday|before the rain began|during the holidays|last winter|"
    "at the end of the month|while the others slept|early in spring|that afternoon|the day after"
)
PLACES = _split(
    "near the station|behind the school|at the market|on the second floor|across the river|beside the chapel|"
    "in a small office|by the harbour|outside the town hall|under the bridge|at the edge of the field|in the hall"
)
REASONS = _split(
    "because nobody else had the time|since the weather was mild|although the road was closed|and then went home|"
    "without saying a word|so that everything would be ready|and nobody minded|as it had always been done|"
    "but it took longer than planned|and the work was soon finished|while the clock struck nine|"
    "even though the lamp was broken"
)
THINGS = _split(
    "The bridge|The house on the corner|The old clock|The garden|The road to the coast|The library|The new roof|"
    "The orchard|The market hall|The path through the wood|The water tower|The harbour wall"
)
STATES = _split(
    "is older than most people think|was built in a single summer|needs a coat of paint|has been closed for a year|"
    "looks best in autumn|can be seen from the hill|belongs to two families|was once much larger|"
    "is quiet at this hour|has changed very little|keeps the wind away|was sold and bought again"
)
# Keys of RULER needles and words of lists: nouns that do not occur in the sentences above.
NOUNS = _split(
    "anchor apple arrow badge basket beacon bottle bucket button cabin candle canvas carpet castle cellar circle "
    "copper cotton cradle curtain dagger desert dragon engine falcon feather forest fountain gravel ginger guitar "
    "hammer hazel helmet island jacket jungle kitten ladder lantern lemon magnet marble meadow mirror mountain "
    "needle oyster orange palace pebble pencil pepper pillow planet pocket puzzle rabbit ribbon rudder rocket saddle "
    "sailor shadow silver spider sponge stable saucer temple thunder ticket timber tunnel turtle valley velvet violin "
    "wagon walnut willow whistle walrus wizard",
    " ",
)
FIRST_NAMES = _split(
    "Ada Alan Anna Boris Carla Chen David Elena Emil Fatima Felix Grace Hana Henry Ivan Julia Karim Laura Leon Maria "
    "Nadia Oscar Paula Peter Rosa Samuel Sofia Thomas Vera Victor",
    " ",
)
LAST_NAMES = _split(
    "Abbot Baker Carver Dale Ellis Fisher Grant Harper Irving Jensen Keller Lambert Marsh Norris Osborn Palmer Quinn "
    "Reeves Sutton Turner Underwood Vance Walton York",
    " ",
)


def sentence(stream: Stream) -> str:
    """Generate a sentence of 5 to 27 words. Its parts are drawn independently, so that none predicts another."""
    if stream.chance(0.25):
        return f"{stream.pick(THINGS)} {stream.pick(STATES)}."
    words = [stream.pick(PEOPLE), stream.pick(ACTS)]
    if stream.chance(0.5):
        words.append(stream.pick(PLACES))
    if stream.chance(0.5):
        words.append(stream.pick(TIMES))
    if stream.chance(0.4):
        words.append(stream.pick(REASONS))
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def sentences(stream: Stream) -> Iterator[str]:
    """Yield sentences without end, each after the first with its separator: a space, or in 10 % a blank line."""
    yield sentence(stream)
    while True:
        yield ("\n\n" if stream.chance(0.1) else " ") + sentence(stream)
