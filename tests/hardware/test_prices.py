"""Prices of hardware: the list that ships, and files of users."""

from datetime import date

import pytest

from libra.errors import ConfigError
from libra.hardware import known_gpus
from libra.hardware.gpus import load_prices

GOOD = "currency: EUR\ngpu_hour:\n  H100-80G: {price: 2.5, source: invoice, date: 2026-01-31}\n"


def test_the_shipped_prices_name_known_gpus_sources_and_dates():
    prices = load_prices()
    assert prices.currency == "USD" and set(prices.gpu_hour) <= set(known_gpus())
    for price in (prices.core_hour, *prices.gpu_hour.values()):
        assert price.price > 0 and price.source and isinstance(price.date, date)


def test_a_file_of_the_user_replaces_them(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    prices = load_prices(path)
    assert (prices.currency, prices.core_hour) == ("EUR", None)
    assert prices.of("h100_80g").price == 2.5
    assert prices.of("A100-80G") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpu_hour: {}\n", "currency"),
        ("currency: USD\nfoo: 1\n", "foo"),
        ("currency: USD\ncore_hour: {price: -1, source: a, date: 2026-01-31}\n", "core_hour.price"),
        ("currency: USD\ncore_hour: {price: 1, source: a, date: soon}\n", "core_hour.date"),
        ("currency: [\n", "YAML"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(tmp_path, text, named):
    path = tmp_path / "prices.yaml"
    with pytest.raises(ConfigError, match=str(path)):
        load_prices(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_prices(path)
