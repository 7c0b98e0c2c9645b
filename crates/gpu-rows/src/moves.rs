//! The table of moves that the kernel of `rows.cu` executes. A move copies, fills or converts pieces of equal size.
//!
//! Rules: the moves of a *phase* are executed at once, so none may read or write bytes that another one writes. Phases
//! are executed one after the other. Addresses are only numbers here: this module reads and writes no device memory.

#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};
use rows::tensor::{Part, StorageType};

/// Units of a tile, as in `rows.cu`. A block of the kernel works on one tile.
const TILE: u32 = 1024;

/// What a move does with the values of a row: fp16 is widened to fp32, or fp32 narrowed to fp16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    None,
    Widen,
    Narrow,
    /// Rounds fp32 to the nearest value that fp16 can represent.
    Round,
}

impl Change {
    /// How many bytes of the source make `written` bytes at the target.
    const fn source_bytes(self, written: u64) -> u64 {
        match self {
            Self::None | Self::Round => written,
            Self::Widen => written / 2,
            Self::Narrow => written * 2,
        }
    }
}

/// Pieces of equal size, each as far from the one before. Addresses are those of the first piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    pub from: u64,
    pub to: u64,
    pub from_stride: u64,
    pub to_stride: u64,
    /// Bytes of a piece at the target.
    pub bytes: u64,
    pub count: usize,
}

impl Pieces {
    /// From where a part is alone, stored so, to its batch.
    pub fn to_batch(part: &Part, storage: StorageType, alone: u64, batch: u64) -> impl Iterator<Item = Self> + Clone {
        let stored = move |bytes| storage.bytes(bytes) as u64;
        part.strided().map(move |of| Self {
            from: alone + stored(of.first.alone),
            to: batch + of.first.in_batch as u64,
            from_stride: stored(of.alone_stride),
            to_stride: of.in_batch_stride as u64,
            bytes: of.first.bytes as u64,
            count: of.count,
        })
    }

    /// From the batch of a part to where it is alone, to be stored so.
    pub fn from_batch(part: &Part, storage: StorageType, batch: u64, alone: u64) -> impl Iterator<Item = Self> {
        Self::to_batch(part, storage, alone, batch).map(
            move |Self { from, to, from_stride, to_stride, bytes, count }| {
                let bytes = storage.bytes(bytes as usize) as u64;
                Self { from: to, to: from, from_stride: to_stride, to_stride: from_stride, bytes, count }
            },
        )
    }

    /// From a part of the batch at `source` to one of the batch at `target`, of the same shape.
    pub fn between(from: &Part, source: u64, to: &Part, target: u64) -> impl Iterator<Item = Self> {
        from.strided().zip(to.strided()).map(move |(from, to)| Self {
            from: source + from.first.in_batch as u64,
            to: target + to.first.in_batch as u64,
            from_stride: from.in_batch_stride as u64,
            to_stride: to.in_batch_stride as u64,
            bytes: from.first.bytes as u64,
            count: from.count,
        })
    }
}

/// An entry of the table, with the layout of `RowMove` in `rows.cu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct RowMove {
    from: u64,
    to: u64,
    from_stride: u64,
    to_stride: u64,
    units: u32,
    outer: u32,
    kind: u32,
    first_tile: u32,
}

/// The values of `Kind` in `rows.cu`. `COPY` and `ZERO` begin five kinds each: for units of 16, 8, 4, 2 and 1 bytes.
mod kind {
    pub const COPY: u32 = 0;
    pub const ZERO: u32 = 5;
    pub const WIDEN: u32 = 10;
    pub const NARROW: u32 = 11;
    pub const ROUND: u32 = 12;
}

/// Moves of the table that are executed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    pub first: usize,
    pub count: u32,
    pub tiles: u32,
}

/// The addresses that a move reads, and those that it writes.
#[cfg(any(test, feature = "simulated-device"))]
pub type Touched = (Vec<std::ops::Range<u64>>, Vec<std::ops::Range<u64>>);

/// Moves that have been collected and are not enqueued yet.
#[derive(Default)]
pub struct Moves {
    table: Vec<RowMove>,
    phases: Vec<Phase>,
    /// Index of the first move of the phase that is being collected.
    first: usize,
    tiles: u32,
    /// Bytes of the rows that come from the host. They are uploaded together with the table.
    carried: Vec<u8>,
    /// Indices of the moves that read `carried`. Their `from` is an offset in it until the table's address is known.
    carriers: Vec<usize>,
}

/// Alignment of each row in `carried`, in bytes.
const CARRIED_ALIGNMENT: usize = 16;

impl Moves {
    pub fn push(&mut self, pieces: Pieces, change: Change) {
        let Pieces { from, to, from_stride, to_stride, bytes, count } = pieces;
        let is_gapless = from_stride == change.source_bytes(bytes) && to_stride == bytes;
        let (outer, piece) = joined(count, bytes, is_gapless);
        let (kind, unit) = match change {
            Change::None => {
                let unit = widest_unit([from, to, piece, if outer > 1 { from_stride | to_stride } else { 0 }]);
                (kind::COPY + narrowness(unit), unit)
            }
            Change::Widen => (kind::WIDEN, 4),
            Change::Narrow => (kind::NARROW, 2),
            Change::Round => (kind::ROUND, 4),
        };
        let whole = RowMove { from, to, from_stride, to_stride, kind, ..Default::default() };
        self.add(whole, outer, piece, unit, change.source_bytes(unit));
    }

    /// Moves pieces of a row from the host, where their `from` counts from the row's first byte, to the device.
    pub fn push_carried(&mut self, pieces: impl Iterator<Item = Pieces>, row: &[u8], change: Change) {
        self.carried.resize(self.carried.len().next_multiple_of(CARRIED_ALIGNMENT), 0);
        let offset = self.carried.len() as u64;
        self.carried.extend_from_slice(row);
        let before = self.table.len();
        pieces.for_each(|pieces| self.push(Pieces { from: offset + pieces.from, ..pieces }, change));
        self.carriers.extend(before..self.table.len());
    }

    /// Fills pieces with zeros; nothing is read.
    pub fn push_zeros(&mut self, pieces: Pieces) {
        let Pieces { to, to_stride, bytes, count, .. } = pieces;
        let (outer, piece) = joined(count, bytes, to_stride == bytes);
        let unit = widest_unit([to, piece, if outer > 1 { to_stride } else { 0 }, 0]);
        let kind = kind::ZERO + narrowness(unit);
        self.add(RowMove { to, to_stride, kind, ..Default::default() }, outer, piece, unit, 0);
    }

    /// Ends a phase: moves that are pushed later are executed after those pushed so far.
    pub fn end_phase(&mut self) {
        let count = (self.table.len() - self.first) as u32;
        if count > 0 {
            self.phases.push(Phase { first: self.first, count, tiles: self.tiles });
            (self.first, self.tiles) = (self.table.len(), 0);
        }
    }

    pub const fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    pub const fn bytes(&self) -> usize {
        self.carried_at() + self.carried.len()
    }

    /// Writes the table to `to`, followed by the rows that it carries. `address` is where the device will have these
    /// bytes; it must be aligned to 16 bytes. Move `index` begins at byte `index * move_bytes()`.
    pub fn write(&mut self, address: u64, to: &mut [u8]) {
        let carried_at = self.carried_at();
        for carrier in self.carriers.drain(..) {
            self.table[carrier].from += address + carried_at as u64;
        }
        let table: &[u8] = bytemuck::cast_slice(&self.table);
        to[..table.len()].copy_from_slice(table);
        to[carried_at..][..self.carried.len()].copy_from_slice(&self.carried);
    }

    pub const fn move_bytes() -> usize {
        size_of::<RowMove>()
    }

    /// Most bytes by which `moves` moves of a row of `row` bytes from the host lengthen the table.
    pub const fn bytes_with_carried(row: usize, moves: usize) -> usize {
        (1 + moves) * Self::move_bytes() + CARRIED_ALIGNMENT + row
    }

    /// Returns the phases in order, and removes all moves.
    pub fn take_phases(&mut self) -> Vec<Phase> {
        self.end_phase();
        self.table.clear();
        self.carried.clear();
        self.first = 0;
        std::mem::take(&mut self.phases)
    }

    const fn carried_at(&self) -> usize {
        (self.table.len() * size_of::<RowMove>()).next_multiple_of(CARRIED_ALIGNMENT)
    }

    /// Adds a move of `outer` pieces. A piece has `piece` bytes at the target. A unit has `unit` bytes at the target
    /// and `from_unit` bytes at the source. Cuts the move into moves of at most `MOST_UNITS` units.
    fn add(&mut self, whole: RowMove, outer: usize, piece: u64, unit: u64, from_unit: u64) {
        if outer == 0 || piece == 0 {
            return;
        }
        // A launch must have fewer than 2³¹ blocks, and a move fewer than 2³² units.
        const MOST_UNITS: u64 = 1 << 30;
        let (units, outer) = (piece / unit, outer as u64);
        if units > MOST_UNITS {
            let starts = |of: u64| (0..units).step_by(MOST_UNITS as usize).map(move |first| (of, first));
            for (of, first) in (0..outer).flat_map(starts) {
                let from = whole.from + of * whole.from_stride + first * from_unit;
                let to = whole.to + of * whole.to_stride + first * unit;
                self.add_part(RowMove { from, to, ..whole }, units.min(first + MOST_UNITS) - first, 1);
            }
            return;
        }
        let at_once = (MOST_UNITS / units.max(1)).max(1);
        for first in (0..outer).step_by(at_once as usize) {
            let (from, to) = (whole.from + first * whole.from_stride, whole.to + first * whole.to_stride);
            self.add_part(RowMove { from, to, ..whole }, units, outer.min(first + at_once) - first);
        }
    }

    fn add_part(&mut self, part: RowMove, units: u64, outer: u64) {
        let tiles = (units * outer).div_ceil(u64::from(TILE)) as u32;
        if self.tiles.checked_add(tiles).is_none_or(|all| all > i32::MAX as u32) {
            // Moves of a phase are independent, so it does no harm to execute some of them later.
            self.end_phase();
        }
        self.table.push(RowMove { units: units as u32, outer: outer as u32, first_tile: self.tiles, ..part });
        self.tiles += tiles;
    }

    /// What each move of a table reads and writes, for the simulated device to check.
    #[cfg(any(test, feature = "simulated-device"))]
    pub fn touched(table: &[u8]) -> Vec<Touched> {
        let touched = |row: &RowMove| {
            let (read, written) = match row.kind {
                kind::WIDEN => (2, 4),
                kind::NARROW => (4, 2),
                kind::ROUND => (4, 4),
                copy if copy < kind::ZERO => (16 >> copy, 16 >> copy),
                zero => (0, 16 >> (zero - kind::ZERO)),
            };
            let pieces = |from: u64, stride: u64, unit: u64| {
                let bytes = u64::from(row.units) * unit;
                let pieces =
                    (0..u64::from(row.outer)).map(move |piece| from + piece * stride..from + piece * stride + bytes);
                pieces.filter(|piece| !piece.is_empty()).collect::<Vec<_>>()
            };
            (pieces(row.from, row.from_stride, read), pieces(row.to, row.to_stride, written))
        };
        table.chunks_exact(size_of::<RowMove>()).map(|row| touched(&bytemuck::pod_read_unaligned(row))).collect()
    }
}

/// Number of pieces, and bytes of each. Pieces without gaps between them, at source and target, are joined into one.
const fn joined(count: usize, bytes: u64, is_gapless: bool) -> (usize, u64) {
    if is_gapless && count > 0 { (1, bytes * count as u64) } else { (count, bytes) }
}

/// The widest unit, in bytes, that divides all numbers.
fn widest_unit(numbers: [u64; 4]) -> u64 {
    1 << numbers.into_iter().fold(16, |all, number| all | number).trailing_zeros()
}

/// Position of a unit among the kinds, which begin with 16 bytes.
const fn narrowness(unit: u64) -> u32 {
    4 - unit.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_more_than_four_gibibytes_are_moved_whole() {
        let (bytes, to_stride) = ((5 << 30) + 3, (6 << 30) + 1);
        let mut moves = Moves::default();
        moves.push_zeros(Pieces { from: 0, to: 1, from_stride: 0, to_stride, bytes, count: 3 });
        let mut expected = 1;
        for (part, at) in moves.table.iter().zip(0..) {
            if at % 6 == 0 {
                expected = 1 + at / 6 * to_stride;
            }
            assert_eq!((part.to, part.outer), (expected, 1), "part {at}");
            expected += u64::from(part.units);
        }
        let moved: u64 = moves.table.iter().map(|part| u64::from(part.units)).sum();
        assert_eq!((moves.table.len(), moved), (18, 3 * bytes));
    }
}
