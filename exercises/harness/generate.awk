# generate.awk - one source, several outputs.   awk -v want=skeleton|solution|mutants|<mutant> -f generate.awk src/<slug>.cpp
#
# An exercise is written once, as its solution, with these marks:
#   //! hole 12          from here to "//! end" the learner writes, about 12 lines
#   //! end
#   //~ name: line       a mutant: the solution with the line above replaced by this one; nothing: the line is left out
#   //~ says: text       what the failing check must then say
#   //? hint 1: text     texts for the commands: hint 1 .. 3, why, asked
# want=mutants lists "name<TAB>text"; want=hint:1 (why, asked) prints such a text, joined to one line.
BEGIN {
  view = want
  if (want ~ /^text:/) { sub(/^text:/, "", want); view = "text" }
}
function slug() { s = FILENAME; sub(/.*\//, "", s); sub(/\.cpp$/, "", s); return s }
function flush_line() { if (have) print held; have = 0 }
/^[ \t]*\/\/\? / {
  if (view == "text") {
    line = $0; sub(/^[ \t]*\/\/\? /, "", line)
    key = line; sub(/:.*/, "", key)
    if (line ~ /^(hint [123]|why|asked):/) { now = key; sub(/^[^:]*: */, "", line) } else sub(/^ +/, "", line)
    if (now == want) print line
  }
  next
}
view == "text" { next }
/^[ \t]*\/\/! hole / { in_hole = 1; lines = $3; indent = $0; sub(/\/\/!.*/, "", indent); hole_seen = 1
  if (want == "skeleton") { flush_line(); print indent "not_implemented(\"" slug() "\", " lines ");  // your lines, in place of this one" }
  next }
/^[ \t]*\/\/! end/ { in_hole = 0; next }
/^[ \t]*\/\/~ says: / {
  text = $0; sub(/^[ \t]*\/\/~ says: /, "", text)
  if (want == "mutants") print mutant "\t" text
  next }
/^[ \t]*\/\/~ / {
  line = $0; sub(/^[ \t]*\/\/~ /, "", line)
  mutant = line; sub(/:.*/, "", mutant)
  sub(/^[^:]*: ?/, "", line)
  if (mutant == want) { used = 1; where = held; sub(/[^ \t].*/, "", where); held = where line; have = (line != "") }
  next }
want == "mutants" { next }
want == "skeleton" && in_hole { next }
{ flush_line(); held = $0; have = 1 }
END {
  if (view != "text" && want != "mutants") flush_line()
  if (want == "skeleton" && !hole_seen) { print FILENAME ": no hole" > "/dev/stderr"; exit 1 }
  if (want !~ /^(skeleton|solution|mutants)$/ && view != "text" && !used) { print FILENAME ": no mutant " want > "/dev/stderr"; exit 1 }
}
