"""Reading YAML: lines, base files, overrides, YAML's traps, and every mistake at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.config.load import Resolved, json_schema
from pkm.config.load import load as load_file
from pkm.errors import UserErrors
from tests.support.sample_schema import Cake, Cream, Jam, Oven, too_sweet


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str | bytes, name: str = "cake.yaml") -> Path:
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(text: str, *overrides: str) -> Resolved[Cake]:
    return load_file(write(text), overrides, Cake, too_sweet)


def mistakes(text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_file(write(text), overrides, Cake, too_sweet)
    return [str(error) for error in caught.value.errors]


GOOD = "name: plain\neggs: 3\n"


def test_a_file_becomes_a_typed_config_with_its_defaults() -> None:
    cake = load(GOOD + "oven: {degrees: 200}\n").config
    assert cake == Cake(name="plain", eggs=3, oven=Oven(degrees=200))


def test_the_resolved_yaml_has_every_default_and_loads_to_an_equal_config() -> None:
    resolved = load(
        GOOD + "sugar: 1e-8\nglaze: none\nnotes: {a: 'off', b: '010', c: 'null'}\ntins: [1, 2]\n", "oven.fan=off"
    )
    assert "degrees: 180" in resolved.yaml and "tins: [1, 2]" in resolved.yaml
    assert load(resolved.yaml).config == resolved.config


def test_an_argument_changes_one_item_of_a_list() -> None:
    text = GOOD + "tins: [1, 2, 3]\nlayers: [{kind: jam, fruit: plum}, {kind: cream, fat: 0.3}]\n"
    cake = load(text, "tins.1=5", "layers.0.fruit=fig", "layers.1.fat=0.5", "notes.0=a digit").config
    assert cake.tins == (1, 5, 3) and cake.notes == {"0": "a digit"}
    assert cake.layers == [Jam(kind="jam", fruit="fig"), Cream(kind="cream", fat=0.5)]


def test_an_item_that_a_list_does_not_have_is_refused() -> None:
    (error,) = mistakes(GOOD + "tins: [1, 2]\n", "tins.2=5")
    assert error.startswith("argument 'tins.2=5': there is no tins.2: tins has 2 items, counted from 0")
    (error,) = mistakes(GOOD + "tins: [1, 2]\n", "tins.1=flat")
    assert error.startswith("argument 'tins.1=flat': tins[1] must be a whole number > 0; found flat")


class TestBase:
    def test_later_keys_win_sections_are_joined_and_lists_replaced(self) -> None:
        write("name: low\neggs: 2\noven: {degrees: 150, fan: false}\ntins: [1, 2]\n", "low.yaml")
        write("base: low.yaml\neggs: 4\ntins: [3]\n", "middle.yaml")
        resolved = load("base: middle.yaml\nname: top\noven: {degrees: 99}\n")
        assert resolved.config == Cake(name="top", eggs=4, oven=Oven(degrees=99, fan=False), tins=(3,))
        where = {key: resolved.where(key) for key in ("name", "eggs", "oven.fan", "oven.degrees", "tins[0]")}
        assert where == {
            "name": "cake.yaml:2",
            "eggs": "middle.yaml:2",
            "oven.fan": "low.yaml:3",
            "oven.degrees": "cake.yaml:3",
            "tins[0]": "middle.yaml:3",
        }

    def test_it_is_relative_to_the_file_that_names_it(self) -> None:
        Path("sub").mkdir()
        write("base: other.yaml\neggs: 4\n", "sub/middle.yaml")
        write("name: other\n", "sub/other.yaml")
        assert load("base: sub/middle.yaml\n").config == Cake(name="other", eggs=4)

    def test_null_removes_a_section(self) -> None:
        write("name: low\neggs: 2\nstand: {degrees: 100}\noven: {degrees: 100}\n", "low.yaml")
        cake = load("base: low.yaml\nstand: null\noven: null\n").config
        assert cake.stand is None and cake.oven == Oven()

    def test_an_empty_section_has_its_defaults(self) -> None:
        assert load(GOOD + "oven:\n  # degrees: 200\n").config.oven == Oven()

    def test_a_circle_is_refused(self) -> None:
        write("base: cake.yaml\n", "other.yaml")
        (error,) = mistakes("base: other.yaml\n" + GOOD)
        assert error.startswith("other.yaml:1: base files go round in a circle: cake.yaml -> other.yaml -> cake.yaml")

    def test_a_missing_base_names_its_line_and_the_nearest_file_and_hides_no_other_mistake(self) -> None:
        write(GOOD, "basic.yaml")
        first, second = mistakes("oven: {fann: true}\nbase: basci.yaml\n")
        assert first == "cake.yaml:1: oven.fann is no setting\n  fix: did you mean oven.fan?"
        assert second == "cake.yaml:2: base: no such file: basci.yaml\n  fix: did you mean basic.yaml?"

    def test_mistakes_of_all_files_are_reported_together_even_where_a_later_file_says_the_same_key(self) -> None:
        write("egs: 3\nsugar: -1\n", "low.yaml")
        errors = mistakes("base: low.yaml\nname: x\neggs: 1\negs: 4\nglaze: mint\n")
        assert [error.split(" ")[0] for error in errors] == [
            "cake.yaml:4:",
            "cake.yaml:5:",
            "low.yaml:1:",
            "low.yaml:2:",
        ]


class TestOverrides:
    def test_they_win_over_every_file_and_the_last_one_over_the_others(self) -> None:
        resolved = load(GOOD, "oven.degrees=90", "sugar=3e-4", "oven.degrees=95", "tins=[4, 5]", "stand={fan: no}")
        expected = Cake(name="plain", eggs=3, oven=Oven(degrees=95), sugar=3e-4, tins=(4, 5), stand=Oven(fan=False))
        assert resolved.config == expected
        assert resolved.where("oven.degrees") == "argument 'oven.degrees=95'"
        assert resolved.where("eggs") == "cake.yaml:2"

    def test_null_takes_a_section_away_and_a_later_one_makes_it_anew(self) -> None:
        text = GOOD + "stand: {degrees: 9}\n"
        assert load(text, "stand=null").config.stand is None
        assert load(text, "stand=null", "stand.fan=false").config.stand == Oven(fan=False)

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ("eggs", "'eggs' is no setting\n  fix: write key=value"),
            ("--eggs=3", "settings have no dashes before them\n  fix: write eggs=3"),
            ("oven..fan=no", "'oven..fan' is no dotted key"),
            ("=3", "'' is no dotted key"),
            ("eggs=", "no value after the `=`\n  fix: write eggs=null"),
            ("tins=[1", "not valid YAML: a list is not closed"),
            ("oven={fan: yes, fan: no}", "fan is given twice, in one value"),
            ("tins.0=3", "there is no tins.0: tins is given no list\n  fix: write tins=[...]"),
            ("base=x.yaml", "base is named in the file"),
            ("eggs=010", "eggs must be a whole number > 0; found 010\n  fix: a leading zero makes YAML read octal (8)"),
            ("ovem.fan=no", "ovem is no setting\n  fix: did you mean oven?"),
            ("oven.fam=no", "oven.fam is no setting\n  fix: did you mean oven.fan?"),
            ("eggs.x=no", "eggs must be a whole number > 0; found a section of keys"),
        ],
    )
    def test_a_mistake_names_the_argument(self, argument: str, says: str) -> None:
        (error,) = mistakes(GOOD, argument)
        assert error.startswith(f"argument {argument!r}: {says}")


class TestScalars:
    """Read as the kind that the setting wants, not as YAML 1.1 would guess."""

    @pytest.mark.parametrize(
        ("line", "key", "value"),
        [
            ("sugar: 3e-4", "sugar", 3e-4),  # text in YAML 1.1
            ("sugar: 2", "sugar", 2.0),
            ("sugar: .5", "sugar", 0.5),
            ("eggs: 1_000_000", "eggs", 1_000_000),
            ("eggs: +4", "eggs", 4),
            ("name: off", "name", "off"),  # false in YAML 1.1
            ("name: no", "name", "no"),
            ("name: 010", "name", "010"),
            ("name: 1:30", "name", "1:30"),
            ("name: 2024-01-01", "name", "2024-01-01"),
            ("name: 2024", "name", "2024"),
            ("name: 'null'", "name", "null"),
            ("path: 7", "path", Path("7")),
            ("oven: {fan: off}", "oven", Oven(fan=False)),
            ("oven: {fan: yes}", "oven", Oven(fan=True)),
            ("oven: {gas: ~}", "oven", Oven(gas=None)),
            ("glaze: none", "glaze", "none"),
        ],
    )
    def test_what_is_written_is_what_is_meant(self, line: str, key: str, value: Any) -> None:
        text = "".join(other + "\n" for other in ("name: plain", "eggs: 3") if not line.startswith(other[:4]))
        assert getattr(load(text + line + "\n").config, key) == value

    @pytest.mark.parametrize(
        ("text", "fix"),
        [
            ("8.0", "write 8, without point or exponent"),
            ("1e3", "write 1000, without point or exponent"),
            ('"4"', "remove the quotes: 4"),
            ("010", "a leading zero makes YAML read octal (8): write 10 or 8"),
            ("1_00", "write 100: underscores may only part groups of three digits"),
            ("1:30", "YAML 1.1 reads colons as base 60: write one decimal number"),
            ("0x10", "write a decimal number"),
            ("null", "give a value, or remove the key"),
            ("true", None),
            ("3.5", None),
            ("off", None),
            ("many", None),
            ("-1", None),
            ("0", None),
        ],
    )
    def test_a_whole_number_is_nothing_else(self, text: str, fix: str | None) -> None:
        (error,) = mistakes(f"name: x\neggs: {text}\n")
        found = f"{text} (text, in quotes)" if '"' in text else text
        end = f"\n  fix: {fix}" if fix else ""
        assert error == f"cake.yaml:2: eggs must be a whole number > 0; found {found}{end}"

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("sugar: .inf", "sugar must be a finite number > 0; found .inf"),
            ("sugar: .nan", "sugar must be a finite number > 0; found .nan"),
            ("sugar: 1e400", "sugar must be a finite number > 0; found 1e400"),
            ("glaze: lemmon", "glaze must be one of: lemon, cocoa, none; found lemmon\n  fix: did you mean lemon?"),
            ("glaze: off", "glaze must be one of: lemon, cocoa, none; found off\n  fix: did you mean none?"),
            ("glaze: null", "glaze must be one of: lemon, cocoa, none; found null\n  fix: write none"),
            ("oven: {gas: off}", "oven.gas must be a number, or null; found off\n  fix: write null for none"),
            ("oven: {fan: 1}", "oven.fan must be true or false; found 1"),
            ("oven: {fan: 'yes'}", 'oven.fan must be true or false; found "yes" (text, in quotes)\n  fix: remove'),
            ("oven: {degrees: 400}", "oven.degrees must be a whole number > 0 and <= 300; found 400"),
            ("oven: hot", "oven must be a section of keys; found hot"),
            ("oven: degrees:3", "oven must be a section of keys; found degrees:3\n  fix: put a space after the colon"),
            ("oven: [1]", "oven must be a section of keys; found [1]"),
            ("tins: 3", "tins must be a list, each item a whole number > 0; found 3"),
            ("tins: {a: 3}", "tins must be a list, each item a whole number > 0; found a section of keys"),
            ("tins: [3, 0]", "tins[1] must be a whole number > 0; found 0"),
            ("size: [3]", "size must be a list of 2 values, each a whole number; found [3]"),
            ("size: [3, 4, 5]", "size must be a list of 2 values, each a whole number; found [3, 4, 5]"),
            ("layers: [{kind: jam}]", "layers[0].fruit is missing"),
            ("layers: [{kind: jam, fat: 3}, 4]", "layers[0].fat is no setting"),
            ("notes: {a: {}}", "notes.a must be text; found a section of keys"),
        ],
    )
    def test_a_wrong_value_is_told_with_what_is_allowed(self, line: str, says: str) -> None:
        errors = mistakes(GOOD + line + "\n")
        assert errors[0].startswith(f"cake.yaml:3: {says}")

    @given(st.floats(min_value=1e-300, max_value=1e300))
    @settings(max_examples=50)
    def test_every_float_comes_back(self, number: float) -> None:
        resolved = load_file(write(f"name: x\neggs: 1\nsugar: {number!r}\n"), (), Cake)
        assert resolved.config.sugar == number
        assert load_file(write(resolved.yaml), (), Cake).config.sugar == number


class TestSyntax:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (GOOD + "oven:\n\tdegrees: 3\n", "cake.yaml:4: not valid YAML: a tab stands where YAML wants spaces"),
            (GOOD + "path: a: b\n", "cake.yaml:3: not valid YAML: a colon stands where no key can be"),
            (GOOD + "oven:\n    fan: no\n  gas: 3\n", "cake.yaml:5: not valid YAML: the indentation does not fit"),
            (GOOD + "tins: [1, 2\n", "cake.yaml:4: not valid YAML: a list is not closed (begun on line 3)"),
            (GOOD + 'path: "a\n', "cake.yaml:4: not valid YAML: a quoted text is not closed (begun on line 3)"),
            (GOOD + "path: *a\n", "cake.yaml:3: not valid YAML: an alias names an anchor that is not there"),
            (GOOD + "---\na: 1\n", "cake.yaml:3: not valid YAML: a second document begins"),
            (GOOD + "eggs: 4\n", "cake.yaml:3: eggs is given twice, on line 2 and on line 3"),
            (
                GOOD + "path: !!python/name:os.system x\n",
                "cake.yaml:3: the tag !!python/name:os.system is not used here",
            ),
            (GOOD + "? [a]\n: 3\n", "cake.yaml:3: a key is not a word"),
            (GOOD.encode() + b"# caf\xe9\n", "cake.yaml:3: not UTF-8: the byte 0xe9"),
            (GOOD.encode() + b"path: a\x00b\n", "cake.yaml:3: the character U+0000 cannot stand in YAML"),
            (GOOD.encode("utf-16"), "cake.yaml:1: not UTF-8"),
            ("", "cake.yaml: the file has no settings"),
            ("# nothing\n", "cake.yaml: the file has no settings"),
            ("- a\n", "cake.yaml:1: the file is a list, not a section of keys"),
            ("name:x\n", "cake.yaml:1: the file is plain text, not a section of keys"),
            (GOOD + "tins: " + "[" * 5000, "cake.yaml:1: sections or lists are nested too deeply"),
        ],
    )
    def test_a_broken_file_is_told_with_its_line(self, text: str | bytes, says: str) -> None:
        (error,) = mistakes(text)
        assert error.startswith(says) and "fix:" in error

    def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(self) -> None:
        path = write(b"\xef\xbb\xbfname: plain\r\neggs: 3\r\n")
        assert load_file(path, (), Cake).config == Cake(name="plain", eggs=3)

    def test_anchors_and_merge_keys_work_and_own_keys_win(self) -> None:
        cake = load(GOOD + "oven: &hot {degrees: 250, fan: no}\nstand: {<<: *hot, degrees: 90}\n").config
        assert cake.oven == Oven(degrees=250, fan=False) and cake.stand == Oven(degrees=90, fan=False)

    @pytest.mark.parametrize(
        "stand", ["stand: {<<: *hot}", "stand: *hot", "stand:\n  <<: [*hot]", "stand: {<<: {<<: *hot}, fan: no}"]
    )
    def test_what_an_alias_brings_in_is_blamed_on_the_line_of_the_alias(self, stand: str) -> None:
        # gas is text there, and a number here.
        (error,) = mistakes(GOOD + "notes: &hot\n  gas: much\n" + stand + "\n")
        line = 6 if "\n" in stand else 5
        assert error.startswith(f"cake.yaml:{line}: stand.gas must be a number, or null; found much")

    def test_an_item_that_is_an_alias_is_blamed_on_its_own_line(self) -> None:
        (error,) = mistakes("name: &a plain\neggs: 3\ntins:\n  - 1\n  - *a\n")
        assert error.startswith("cake.yaml:5: tins[1] must be a whole number > 0; found plain")

    def test_a_mistake_at_an_anchor_is_not_said_again_of_its_aliases(self) -> None:
        (error,) = mistakes(GOOD + "oven: &hot {degrees: 1, degrees: 2}\nstand: *hot\n")
        assert error.startswith("cake.yaml:3: degrees is given twice")

    def test_two_merge_keys_in_one_section_are_refused(self) -> None:
        (error,) = mistakes(GOOD + "oven: &a {degrees: 250}\nstand:\n  <<: *a\n  <<: {fan: no}\n")
        assert error.startswith("cake.yaml:6: << is given twice, on line 5 and on line 6") and "<<: [*a, *b]" in error

    @pytest.mark.parametrize(
        "item", ["[{}]", "{{a: {0}, b: {0}, c: {0}}}", "{{<<: [{}]}}"], ids=["list", "map", "merge"]
    )
    def test_aliases_that_unfold_without_end_are_refused_at_once(self, item: str) -> None:
        lines = ["notes: &n0 {a: b}"]
        for depth in range(1, 30):
            inner = item.format(f"*n{depth - 1}" if "a:" in item else ", ".join([f"*n{depth - 1}"] * 9))
            lines.append(f"layers{depth}: &n{depth} {inner}")
        assert any("unfold to more than 100,000 values" in error for error in mistakes(GOOD + "\n".join(lines) + "\n"))

    def test_an_anchor_that_holds_itself_is_refused(self) -> None:
        assert any("an anchor holds itself" in error for error in mistakes(GOOD + "notes: &a {b: *a}\n"))

    def test_keys_given_twice_within_sections_are_all_named(self) -> None:
        errors = mistakes(GOOD + "oven: {degrees: 9}\nstand:\n  fan: no\n  fan: yes\noven:\n  fan: no\n")
        assert [error.split("\n")[0] for error in errors] == [
            "cake.yaml:6: fan is given twice, on line 5 and on line 6",
            "cake.yaml:7: oven is given twice, on line 3 and on line 7",
        ]


class TestFiles:
    def test_a_missing_file_is_told_with_the_nearest_name(self) -> None:
        write(GOOD, "lemon.yaml")
        with pytest.raises(UserErrors, match=r"no such file: lemn.yaml\n  fix: did you mean lemon.yaml\?"):
            load_file(Path("lemn.yaml"), (), Cake)
        with pytest.raises(UserErrors, match=r"did you mean lemon.yaml\?"):
            load_file(Path("lemon"), (), Cake)
        with pytest.raises(UserErrors, match="there is no directory nowhere"):
            load_file(Path("nowhere/lemon.yaml"), (), Cake)

    def test_a_directory_is_told_with_the_files_in_it(self) -> None:
        Path("sub").mkdir()
        write(GOOD, "sub/a.yaml")
        with pytest.raises(UserErrors, match=r"sub is a directory\n  fix: name one of its files: a.yaml"):
            load_file(Path("sub"), (), Cake)

    def test_a_file_that_is_not_there_hides_no_mistake_of_the_arguments(self) -> None:
        with pytest.raises(UserErrors) as caught:
            load_file(Path("no.yaml"), ("egs=3", "eggs=x"), Cake)
        assert len(caught.value.errors) == 3


class TestEverythingAtOnce:
    def test_five_mistakes_are_five_errors_in_the_order_of_their_lines(self) -> None:
        text = "name: x\neggs: 2\nsugar: 3.0\noven:\n  degrees: hot\n  fann: no\nglaze: lemo\ntins: 4\n"
        errors = mistakes(text)
        assert [error.split(" ")[0] for error in errors] == [f"cake.yaml:{line}:" for line in (3, 5, 6, 7, 8)]
        assert errors[0] == "cake.yaml:3: sugar: 3.0 is too sweet for 2 eggs\n  fix: less"

    def test_missing_keys_are_named_with_their_meaning(self) -> None:
        errors = mistakes("oven: {}\n")
        assert errors == [
            "cake.yaml: name is missing\n  fix: add `name:` (text)",
            "cake.yaml: eggs is missing\n  fix: add `eggs:` (a whole number > 0)",
        ]

    def test_a_combination_is_not_blamed_for_a_setting_that_is_wrong_itself(self) -> None:
        assert len(mistakes("name: x\neggs: two\nsugar: 3.0\n")) == 1
        assert len(mistakes("name: x\nsugar: 3.0\n")) == 1

    def test_a_misspelt_key_is_taken_as_meant_for_what_depends_on_it(self) -> None:
        (error,) = mistakes("name: x\nEggs: 4\nsugar: 3.0\n")
        assert error == "cake.yaml:2: Eggs is no setting\n  fix: did you mean eggs?"

    def test_a_key_of_another_section_is_sent_there(self) -> None:
        errors = mistakes(GOOD + "fan: no\noven: {sugar: 3}\n")
        assert errors == [
            "cake.yaml:3: fan is no setting\n  fix: it belongs elsewhere: oven.fan, stand.fan",
            "cake.yaml:4: oven.sugar is no setting\n  fix: it belongs elsewhere: sugar",
        ]

    def test_an_unknown_key_with_no_near_spelling_gets_the_list(self) -> None:
        (error,) = mistakes(GOOD + "oven: {quux: 3}\n")
        assert error == "cake.yaml:3: oven.quux is no setting\n  fix: oven has: degrees, fan, gas"

    def test_a_validator_of_the_schema_speaks_for_itself(self) -> None:
        assert mistakes("name: pie\neggs: 3\n") == ["cake.yaml:1: name: a pie is no cake"]

    @given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "eggs", "oven", "fan", "layers", "kind", "tins", "size", "<<"]), inner, max_size=4),
    ), max_leaves=12))  # fmt: skip
    @settings(max_examples=200, deadline=None)
    def test_any_tree_is_a_config_or_a_list_of_mistakes(self, tree: Any) -> None:
        import yaml

        path = write(yaml.safe_dump(tree, allow_unicode=True))
        try:
            load_file(path, (), Cake, too_sweet)
        except UserErrors as errors:
            assert errors.errors


def test_the_json_schema_knows_base_and_asks_for_nothing() -> None:
    schema = json_schema(Cake)
    assert schema["properties"]["base"]["type"] == "string"
    assert "required" not in schema and schema["additionalProperties"] is False
    assert schema["$defs"]["Oven"]["properties"]["degrees"]["description"] == "Celsius."
