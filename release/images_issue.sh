#!/usr/bin/env bash
# Compares the images (release/images.py), and writes what is new into the one open issue with the label `images`.
# Needs gh with GH_TOKEN and GH_REPO. Fails if a list could not be read.
set -euo pipefail
cd "$(dirname "$0")/.."
text=$(mktemp)
python3 -m release.images --out "$text" && { echo "nothing new"; exit 0; } || code=$?
[ "$code" = 1 ] && [ -s "$text" ] || exit "$code" # Python itself ends with 1, and no text, after an error
gh label create images --force --description "Colab's or Kaggle's image has changed" --color c5def5
number=$(gh issue list --label images --state open --limit 1 --json number --jq '.[].number')
if [ -n "$number" ]; then
  gh issue edit "$number" --body-file "$text"
else
  gh issue create --title "The images of Colab or Kaggle have changed" --label images --body-file "$text"
fi
