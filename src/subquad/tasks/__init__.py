"""Experiments, one file each."""

from subquad.tasks.copy import Copy
from subquad.tasks.digits import DigitsTask
from subquad.tasks.images import Images
from subquad.tasks.lra.image import Image
from subquad.tasks.lra.listops import ListOps
from subquad.tasks.lra.pathfinder import Pathfinder, PathX
from subquad.tasks.lra.retrieval import Retrieval
from subquad.tasks.lra.text import Text as IMDb
from subquad.tasks.music import Music
from subquad.tasks.pairs import Pairs
from subquad.tasks.speech import Speech
from subquad.tasks.text import Text
from subquad.training.task import Task

TASKS: dict[str, type[Task]] = {
    "digits": DigitsTask,
    "copy": Copy,
    "images": Images,
    "text": Text,
    "speech": Speech,
    "music": Music,
    "pairs": Pairs,
    "listops": ListOps,
    "imdb": IMDb,
    "retrieval": Retrieval,
    "image": Image,
    "pathfinder": Pathfinder,
    "pathx": PathX,
}
