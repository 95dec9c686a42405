"""Parses every PromQL expression of the dashboards and rules; ends with 1 at the first wrong one.

That the names in them exist is checked by tests/unit/test_dashboards.py.
"""

import json
import sys
from pathlib import Path

import promql_parser
import yaml

DEPLOY = Path(__file__).parent
queries = [
    (f"{path.name}: {panel['title']}", target["expr"].replace("$run", "a_run"))
    for path in sorted(DEPLOY.glob("grafana/dashboards/*.json"))
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
    for target in panel["targets"]
]
rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))
queries += [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
for name, query in queries:
    try:
        promql_parser.parse(query)
    except ValueError as error:
        sys.exit(f"{name}: {query}: {error}")
print(f"{len(queries)} queries can be parsed")
