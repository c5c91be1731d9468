"""What deletes a rented machine in the end, on the machine itself."""

GUARD_LOG = "/var/tmp/tpukit-guard.txt"
GUARD_END = "/var/lib/tpukit-end"

# Runs on every host at every start, as root. The end is counted from the first start, and a machine that comes later than its
# request was meant to wait, when nobody looks any more, goes at once. Its clock and the time of the request are Google's.
# No "~" in it: that separates the metadata.
GUARD = """#!/bin/bash
# By tpukit: this machine deletes itself, whatever runs on it and whoever is gone.
say() {{ echo "$(date -u +%FT%TZ) $*" >> {log}; }}
request="{name} --zone={zone} --project={project}"
asked=$(gcloud compute tpus queued-resources describe $request "--format=value(createTime)" 2>> {log})
latest=$(( $(date -d "${{asked:-now}}" +%s) + {patience_s} ))
[ -s {end} ] || echo $(( $(date +%s) > latest ? $(date +%s) : $(date +%s) + {minutes} * 60 )) > {end}
end=$(cat {end})
if [ -n "$asked" ]; then
  say "asks for its own deletion at $(date -u -d "@$end" +%FT%TZ): its account may look; whether it may delete shows then"
else
  say "NOT SAFE: its service account cannot even look at its own request; it will try to delete itself, and may fail"
fi
while [ $(date +%s) -lt $end ]; do sleep 20; done
while true; do
  say "time is up"
  gcloud compute tpus queued-resources delete $request --force --quiet --async >> {log} 2>&1
  sleep 60
done
"""


def guard_script(name, zone, project, minutes, *, patience_s):
    """The script for a machine that is to live so many minutes. patience_s: so long after it was asked for it may come."""
    settings = dict(minutes=minutes, patience_s=patience_s, log=GUARD_LOG, end=GUARD_END)
    return GUARD.format(name=name, zone=zone, project=project, **settings)
