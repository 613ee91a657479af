"""The option that says how many recipes are planned."""

from datetime import date


def pytest_addoption(parser):
    parser.addoption(
        "--recipes",
        default=str(date.today().toordinal()),
        metavar="full|SEED",
        help="recipes that tests/recipes plans: all, or a sample by this seed (default: the date's)",
    )


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"recipes planned: --recipes={terminalreporter.config.getoption('--recipes')}")
