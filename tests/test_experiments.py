import pytest

from pkm import experiments
from pkm.configfile import dump
from pkm.errors import UserErrors
from pkm.report.tables import comparison
from tests.tiny import tiny_config


@pytest.fixture
def config_file(tiny_corpus_path, tmp_path):
    def write(name, corpus=tiny_corpus_path, **sections):
        config = tiny_config(name=name, corpus={"path": str(corpus)}, runs=str(tmp_path / "runs"), **sections)
        path = tmp_path / f"{name.replace('/', '-')}.yaml"
        path.write_text(dump(config))
        return path

    return write


def test_a_grid_runs_each_config_once_and_goes_past_one_that_fails(config_file, tmp_path):
    files = [config_file("bad", corpus=tmp_path / "nowhere"), config_file("good", optim={"steps": 2})]
    said = []
    for _ in range(2):
        outcomes = experiments.run(experiments.cells(files, []), said.append)
        assert [o.state for o in outcomes] == ["failed", "finished"]
    assert said == ["[1/2] bad", "[2/2] good", "[1/2] bad", "[2/2] good: finished already"]
    table = comparison([(o.cell.config.name, o.state, o.reason, o.cell.report()) for o in outcomes])
    assert "| bad  | failed" in table and "1,024" in table.splitlines()[3]


def test_two_configs_cannot_share_a_run_directory_and_mistakes_come_all_at_once(config_file):
    one, other = config_file("a/b"), config_file("wrong")
    twin = one.with_name("twin.yaml")
    twin.write_text(one.read_text())
    other.write_text(other.read_text().replace("heads: 2", "heads: two", 1))
    with pytest.raises(UserErrors) as caught:
        experiments.cells([one, twin, other], [])
    text = str(caught.value)
    assert "2 of 3 configs" in text and "run directory" in text and "heads" in text
