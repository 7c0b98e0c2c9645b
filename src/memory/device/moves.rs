//! The table of moves that the kernel of `rows.cu` carries out: which bytes go where.
//!
//! Rules: the moves of a phase happen at once, so none may read or write what another one of the phase writes; phases
//! happen one after the other. Addresses are numbers here: nothing is read or written.

#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};

use crate::tensor::RowLayout;

/// Units of a tile: what a block of the kernel does. As in `rows.cu`.
const TILE: u32 = 1024;

/// What a move does with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Copies them.
    None,
    /// fp16 becomes fp32.
    Widen,
    /// fp32 becomes fp16.
    Narrow,
    /// fp32 is rounded to what fp16 can hold.
    Round,
}

/// A row in memory of a device: alone, or one of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowIn {
    /// Address of the batch.
    pub address: u64,
    /// Which row.
    pub index: usize,
    /// Rows of the batch.
    pub rows: usize,
}

impl RowIn {
    /// A row that is alone.
    pub const fn alone(address: u64) -> Self {
        Self { address, index: 0, rows: 1 }
    }

    /// Address of its first piece, and bytes from one piece to the next.
    const fn pieces(self, piece: u64) -> (u64, u64) {
        (self.address + self.index as u64 * piece, self.rows as u64 * piece)
    }
}

/// A row of the table. As in `rows.cu`.
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

/// Numbers of kinds, as in `rows.cu`: copies of 16, 8, 4, 2 and 1 bytes, zeros of as many, and changes of type.
mod kind {
    pub const COPY: u32 = 0;
    pub const ZERO: u32 = 5;
    pub const WIDEN: u32 = 10;
    pub const NARROW: u32 = 11;
    pub const ROUND: u32 = 12;
}

/// Moves that happen at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Number of the first move.
    pub first: usize,
    /// How many.
    pub count: u32,
    /// Tiles of all of them.
    pub tiles: u32,
}

/// Moves that are to happen.
#[derive(Default)]
pub struct Moves {
    table: Vec<RowMove>,
    phases: Vec<Phase>,
    /// First move of the phase that is being written.
    first: usize,
    tiles: u32,
    /// Rows from the host; moves that read them have their offset here instead of an address.
    carried: Vec<u8>,
    carriers: Vec<usize>,
}

/// Bytes that rows from the host are aligned to.
const CARRIED_ALIGNMENT: usize = 16;

impl Moves {
    /// A row that lies on the device.
    pub fn push(&mut self, layout: RowLayout, from: RowIn, to: RowIn, change: Change) {
        let (piece_from, piece_to) = piece_bytes(layout, change);
        let ((from, from_stride), (to, to_stride)) = (from.pieces(piece_from), to.pieces(piece_to));
        let is_gapless = from_stride == piece_from && to_stride == piece_to;
        let (outer, piece) = pieces(layout, piece_to, is_gapless);
        let (kind, unit) = match change {
            Change::None => {
                let unit = widest_unit([from, to, piece, if outer > 1 { from_stride | to_stride } else { 0 }]);
                (kind::COPY + narrowness(unit), unit)
            }
            Change::Widen => (kind::WIDEN, 4),
            Change::Narrow => (kind::NARROW, 2),
            Change::Round => (kind::ROUND, 4),
        };
        self.add(RowMove { from, to, from_stride, to_stride, kind, ..Default::default() }, outer, piece, unit);
    }

    /// A row that the host has.
    pub fn push_carried(&mut self, layout: RowLayout, row: &[u8], to: RowIn, change: Change) {
        self.carried.resize(self.carried.len().next_multiple_of(CARRIED_ALIGNMENT), 0);
        let offset = self.carried.len() as u64;
        self.carried.extend_from_slice(row);
        let before = self.table.len();
        self.push(layout, RowIn::alone(offset), to, change);
        self.carriers.extend(before..self.table.len());
    }

    /// Fills a row with zeros.
    pub fn push_zeros(&mut self, layout: RowLayout, to: RowIn) {
        let inner = layout.inner_bytes as u64;
        let (to, to_stride) = to.pieces(inner);
        let (outer, piece) = pieces(layout, inner, to_stride == inner);
        let unit = widest_unit([to, piece, if outer > 1 { to_stride } else { 0 }, 0]);
        let kind = kind::ZERO + narrowness(unit);
        self.add(RowMove { to, to_stride, kind, ..Default::default() }, outer, piece, unit);
    }

    /// What is pushed from now on happens after what has been.
    pub fn end_phase(&mut self) {
        let count = (self.table.len() - self.first) as u32;
        if count > 0 {
            self.phases.push(Phase { first: self.first, count, tiles: self.tiles });
            (self.first, self.tiles) = (self.table.len(), 0);
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Bytes of the table and of what it carries.
    pub const fn bytes(&self) -> usize {
        self.carried_at() + self.carried.len()
    }

    /// Writes the table, and what it carries behind it, for a place on the device that begins at `address`, which is
    /// aligned to 16 bytes. Moves begin at `index * move_bytes()`.
    pub fn write(&mut self, address: u64, to: &mut [u8]) {
        let carried_at = self.carried_at();
        for carrier in self.carriers.drain(..) {
            self.table[carrier].from += address + carried_at as u64;
        }
        let table: &[u8] = bytemuck::cast_slice(&self.table);
        to[..table.len()].copy_from_slice(table);
        to[carried_at..][..self.carried.len()].copy_from_slice(&self.carried);
    }

    /// Bytes of a move in the table.
    pub const fn move_bytes() -> usize {
        size_of::<RowMove>()
    }

    /// Bytes that a row of the host's adds at most.
    pub const fn bytes_with_carried(row: usize) -> usize {
        Self::move_bytes() + CARRIED_ALIGNMENT + row
    }

    /// The phases, in their order. Nothing is left.
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

    /// Adds a move of pieces of so many bytes of the target, cut so that the numbers of its units fit.
    fn add(&mut self, whole: RowMove, outer: usize, piece: u64, unit: u64) {
        if outer == 0 || piece == 0 {
            return;
        }
        // A launch has fewer than 2³¹ blocks, and a move fewer than 2³² units.
        const MOST_UNITS: u64 = 1 << 30;
        let (units, outer) = (piece / unit, outer as u64);
        if units > MOST_UNITS && outer == 1 {
            let from_unit = unit_read(whole.kind, unit);
            for first in (0..units).step_by(MOST_UNITS as usize) {
                let part = RowMove { from: whole.from + first * from_unit, to: whole.to + first * unit, ..whole };
                self.add_part(part, units.min(first + MOST_UNITS) - first, 1);
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
            // Moves of a phase do not touch, so they may as well happen one after the other.
            self.end_phase();
        }
        self.table.push(RowMove { units: units as u32, outer: outer as u32, first_tile: self.tiles, ..part });
        self.tiles += tiles;
    }
}

/// The pieces that a move reads, and those that it writes.
#[cfg(any(test, feature = "simulated-device"))]
pub type Touched = (Vec<std::ops::Range<u64>>, Vec<std::ops::Range<u64>>);

impl Moves {
    /// What the moves of a phase read and write, for the simulated device to check.
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

/// Bytes of a piece of the row on both sides.
const fn piece_bytes(layout: RowLayout, change: Change) -> (u64, u64) {
    let wide = layout.inner_bytes as u64;
    match change {
        Change::None | Change::Round => (wide, wide),
        Change::Widen => (wide / 2, wide),
        Change::Narrow => (wide, wide / 2),
    }
}

/// Number of pieces and bytes of one; those that lie without a gap on both sides are one.
const fn pieces(layout: RowLayout, piece: u64, is_gapless: bool) -> (usize, u64) {
    if is_gapless && layout.outer > 0 { (1, piece * layout.outer as u64) } else { (layout.outer, piece) }
}

/// The widest unit that divides all of them.
fn widest_unit(numbers: [u64; 4]) -> u64 {
    1 << numbers.into_iter().fold(16, |all, number| all | number).trailing_zeros()
}

/// Kinds go from 16 bytes down.
const fn narrowness(unit: u64) -> u32 {
    4 - unit.trailing_zeros()
}

/// Bytes that are read for a unit of the target.
const fn unit_read(kind: u32, unit: u64) -> u64 {
    match kind {
        kind::WIDEN => 2,
        kind::NARROW => 4,
        _ => unit,
    }
}
