"""The table of metrics."""

from stepscope.metrics import BY_KEY, DERIVED, SCOPES, TABLE, of_scope


def test_keys_are_unique_and_described() -> None:
    assert len(BY_KEY) == len(TABLE) + len(DERIVED)
    for metric in BY_KEY.values():
        assert metric.label and metric.description and metric.unit


def test_every_metric_is_a_column_of_one_scope() -> None:
    assert sum(len(of_scope(scope)) for scope in SCOPES) == len(TABLE)
