"""Run in the clients' environments: a class that schemas are made of, as their users have them."""

from pydantic import BaseModel
from report import WEATHER


class Weather(BaseModel):
    """How warm it is in a city."""

    city: str
    degrees: int


WARM = Weather(**WEATHER)
