#!/usr/bin/env bash
# Checks that every decision has the form that docs/decisions/README.md asks for and stands in its index, and that the files and tests are there that the
# threat model and ARCHITECTURE.md name.
set -euo pipefail
cd "$(dirname "$0")/../docs/decisions"

bad=0
complain() {
  echo "docs/decisions/$1: $2"
  bad=1
}

shopt -s nullglob
for page in *.md; do
  [[ $page != README.md ]] || continue
  [[ $page =~ ^[0-9]{4}-[a-z0-9-]+\.md$ ]] || complain "$page" "the name is not NNNN-title.md"
  grep -qE '^Date: [0-9]{4}-[0-9]{2}-[0-9]{2}$' "$page" || complain "$page" "there is no line 'Date: YYYY-MM-DD'"
  grep -qE '^Status: (accepted|superseded by \[[0-9]{4}\]\(.+\.md\))$' "$page" ||
    complain "$page" "there is no line 'Status: accepted' or 'Status: superseded by [NNNN](page.md)'"
  (($(wc -l <"$page") <= 60)) || complain "$page" "it is longer than a page (60 lines): what explains how a thing works belongs into docs/reference"
  grep -qF "($page)" README.md || complain "$page" "it is not in the index in README.md"
done
while IFS= read -r page; do
  [[ -e $page ]] || complain README.md "the index names $page, which does not exist"
done < <(grep -oE '\([0-9]{4}-[a-z0-9-]+\.md\)' README.md | tr -d '()')
numbers=$(printf '%s\n' [0-9]*.md | cut -c1-4 | sort | uniq -d)
[[ -z $numbers ]] || complain README.md "these numbers are used twice: $numbers"
while IFS= read -r test; do
  [[ -n $(find ../../crates -path "*/$test" -print -quit) ]] || complain ../threat-model.md "it, or ARCHITECTURE.md, names $test, which does not exist"
done < <(grep -ohE '`[a-z_/]+\.rs`' ../threat-model.md ../../ARCHITECTURE.md | tr -d '`' | sort -u)
names=$(grep -rhoE '\b(fn|def) [a-z0-9_]+' --include=*.rs --include=*.py ../../crates ../../bindings/python/tests | cut -d' ' -f2)
while IFS= read -r test; do
  grep -qx "$test" <<<"$names" || complain ../threat-model.md "it names the test $test, which does not exist"
done < <(grep -oE '`[a-z0-9]+(_[a-z0-9]+){4,}`' ../threat-model.md | tr -d '`' | sort -u)
exit "$bad"
