export interface Piece { text: string; kind: "same" | "added" | "removed" }

const MOST = 4_000_000; // comparisons; beyond them, what differs is one piece

/** Compare two texts word by word: the longest common subsequence, behind common begins and ends. */
export function diffWords(before: string, after: string): Piece[] {
  const a = words(before), b = words(after);
  let begin = 0, end = 0;
  while (begin < Math.min(a.length, b.length) && a[begin] === b[begin]) begin++;
  while (end < Math.min(a.length, b.length) - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const found: Piece[] = [];
  const add = (kind: Piece["kind"], text: string) => {
    const last = found[found.length - 1];
    if (last?.kind === kind) last.text += text;
    else if (text) found.push({ kind, text });
  };
  add("same", a.slice(0, begin).join(""));
  between(a.slice(begin, a.length - end), b.slice(begin, b.length - end), add);
  add("same", a.slice(a.length - end).join(""));
  return found;
}

const words = (text: string) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

function between(a: string[], b: string[], add: (kind: Piece["kind"], text: string) => void) {
  const wide = b.length + 1;
  if (a.length * wide > MOST) {
    add("removed", a.join(""));
    add("added", b.join(""));
    return;
  }
  const longest = new Uint32Array((a.length + 1) * wide); // of the rests from i and j on
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * wide + j] = a[i] === b[j] ? longest[(i + 1) * wide + j + 1]! + 1 : Math.max(longest[(i + 1) * wide + j]!, longest[i * wide + j + 1]!);
    }
  }
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i++]!); j++; }
    else if (j >= b.length || (i < a.length && longest[(i + 1) * wide + j]! >= longest[i * wide + j + 1]!)) add("removed", a[i++]!);
    else add("added", b[j++]!);
  }
}
